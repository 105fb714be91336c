"""The core's own plugin: embedded engine and trainer, local runtime, text adapter, transports, stages with a model."""

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
            "Embedded: on CPUs or GPUs, over one rank or several; token-budgeted micro-batches, AdamW.",
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
        "broadcast": Component(
            "relax_core.transports:BroadcastTransport",
            summary="Broadcasts to all engines at once, by gloo or NCCL; late ones pull over TCP.",
        ),
        "tcp": Component("relax_core.transports:TcpTransport", summary="Engines pull over TCP, from any machine."),
    }


def relax_stages() -> Mapping[str, Component]:
    from relax_core.torch.stage_config import ReferenceConfig, TeacherConfig

    return {
        "critic": Component(
            "relax_core.torch.critic_stage:CriticStage",
            summary="The value of the state before each sampled token, from the critic.",
            makes=frozenset({"values"}),
        ),
        "reference": Component(
            "relax_core.torch.reference:Reference",
            ReferenceConfig,
            "Log-probs under a frozen model, or under the policy as it was some steps ago, for KL penalties.",
            makes=frozenset({"ref_logprobs"}),
        ),
        "teacher": Component(
            "relax_core.torch.teacher:Teacher",
            TeacherConfig,
            "What another model says of the sampled tokens, for distillation.",
            makes=frozenset({"teacher_logprobs", "topk_ids", "teacher_topk_logprobs", "teacher_full_logprobs"}),
        ),
    }
