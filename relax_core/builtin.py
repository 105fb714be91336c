"""The core's own plugin: the embedded engine and trainer, the local runtime, the text adapter, two transports."""

from __future__ import annotations

from collections.abc import Mapping

from relax_core.hookspecs import API_VERSION
from relax_core.interfaces import Component

relax_api = API_VERSION


def relax_models() -> Mapping[str, Component]:
    from relax_core.models.config import TextConfig

    return {
        "text": Component(
            "relax_core.models.text:TextAdapter",
            TextConfig,
            "A causal language model of the transformers library, from a local folder or random weights.",
        )
    }


def relax_engines() -> Mapping[str, Component]:
    from relax_core.torch.config import EngineConfig

    return {
        "torch": Component(
            "relax_core.torch.engine:TorchEngine",
            EngineConfig,
            "Embedded: samples with the transformers model itself; batches with a key-value cache.",
        )
    }


def relax_trainers() -> Mapping[str, Component]:
    from relax_core.torch.config import TrainerConfig

    return {
        "torch": Component(
            "relax_core.torch.trainer:TorchTrainer",
            TrainerConfig,
            "Embedded: one process on a CPU or a GPU; token-budgeted micro-batches, AdamW.",
        )
    }


def relax_runtimes() -> Mapping[str, Component]:
    from relax_core.runtime_config import LocalConfig

    return {
        "local": Component(
            "relax_core.runtime:LocalRuntime", LocalConfig, "One machine; engine in this process or in one of its own."
        )
    }


def relax_transports() -> Mapping[str, Component]:
    return {
        "copy": Component("relax_core.transports:CopyTransport", summary="Copies within one process."),
        "shared": Component("relax_core.transports:SharedTransport", summary="Copies through shared memory."),
    }
