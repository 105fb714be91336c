"""The log-mel spectrogram of Whisper's feature extractor, bit for bit, without what that one does around it.

It drops the lock of the interpreter while it computes, so that several threads work at once. Torch is imported by the
first sound: who hears none does not pay for it.

Shape legend: N samples, M mel bins, B frequency bins, S spectrogram frames.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

_FLOOR, _RANGE = 1e-10, 8.0
"""Least power, and how far below the loudest bin a value may lie, in powers of ten (Whisper, arXiv:2212.04356)."""
_HIGHEST_HZ = 8000.0
"""Of the mel filters, whatever the rate."""


class LogMel:
    """Spectrograms of mono sound at ``rate`` samples a second: one frame for every ``hop`` samples."""

    def __init__(self, mel_bins: int, rate: int, hop: int, fft: int) -> None:
        self._mel_bins, self._rate, self._hop, self._fft = mel_bins, rate, hop, fft

    @cached_property
    def _tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The window (fft,) and the filters (M, B), float32."""
        import torch
        from transformers.audio_utils import mel_filter_bank

        filters_BM = mel_filter_bank(
            num_frequency_bins=1 + self._fft // 2,
            num_mel_filters=self._mel_bins,
            min_frequency=0.0,
            max_frequency=_HIGHEST_HZ,
            sampling_rate=self._rate,
            norm="slaney",
            mel_scale="slaney",
        )
        return torch.hann_window(self._fft), torch.from_numpy(filters_BM).to(torch.float32).T

    def __call__(self, wave_N: NDArray[np.float32]) -> NDArray[np.float32]:
        """(M, S) float32 of more than ``fft / 2`` samples, float32."""
        import torch

        window, filters_MB = self._tables
        with torch.inference_mode():
            wave = torch.from_numpy(np.ascontiguousarray(wave_N))
            frequencies_BS = torch.stft(wave, self._fft, self._hop, window=window, return_complex=True)[:, :-1]
            powers_BS = frequencies_BS.abs().square_().contiguous()
            logs_MS = (filters_MB @ powers_BS).clamp_(min=_FLOOR).log10_()
            result: NDArray[np.float32] = (
                torch.maximum(logs_MS, logs_MS.amax() - _RANGE).add_(_RANGE / 2).div_(_RANGE / 2).numpy()
            )
        return result
