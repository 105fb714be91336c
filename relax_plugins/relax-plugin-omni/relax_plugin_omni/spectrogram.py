"""The log-mel spectrogram of Whisper's feature extractor, bit for bit, without what that one does around it.

It drops the lock of the interpreter while it computes, so that several threads work at once.

Shape legend: N samples, M mel bins, B frequency bins, S spectrogram frames.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import WhisperFeatureExtractor

_FLOOR, _RANGE = 1e-10, 8.0
"""Least power, and how far below the loudest bin a value may lie, in powers of ten (Whisper, arXiv:2212.04356)."""


class LogMel:
    """Spectrograms of mono sound at ``rate`` samples a second: one frame for every ``hop`` samples."""

    def __init__(self, mel_bins: int, rate: int, hop: int, fft: int) -> None:
        extractor = WhisperFeatureExtractor(  # type: ignore[no-untyped-call]
            feature_size=mel_bins, sampling_rate=rate, hop_length=hop, n_fft=fft
        )
        self._hop, self._fft = hop, fft
        self._window = torch.hann_window(fft)
        self._filters_MB = torch.from_numpy(extractor.mel_filters).to(torch.float32).T

    def __call__(self, wave_N: NDArray[np.float32]) -> NDArray[np.float32]:
        """(M, S) float32 of more than ``fft / 2`` samples, float32."""
        with torch.inference_mode():
            wave = torch.from_numpy(np.ascontiguousarray(wave_N))
            frequencies_BS = torch.stft(wave, self._fft, self._hop, window=self._window, return_complex=True)[:, :-1]
            powers_BS = frequencies_BS.abs().square_().contiguous()
            logs_MS = (self._filters_MB @ powers_BS).clamp_(min=_FLOOR).log10_()
            result: NDArray[np.float32] = (
                torch.maximum(logs_MS, logs_MS.amax() - _RANGE).add_(_RANGE / 2).div_(_RANGE / 2).numpy()
            )
        return result
