"""The narrow seams of Relax: what each kind of component promises. Everything else is behind them.

A component is a class with a nested ``Config`` (or one given from a light module, see ``Component``). The core builds
it from its section of the run file.
"""

from relax_core.interfaces.algorithm import About, Algorithm, Batch, Loss, Member, Outputs, Row, ScoredGroup, Streaming
from relax_core.interfaces.authoring import Environment, Modality, Reward, RewardValue
from relax_core.interfaces.component import Columns, Component, ComponentConfig, Configurable, Interrupt
from relax_core.interfaces.engine import POOLS, Completion, Engine, Pool, Request
from relax_core.interfaces.model import Extended, ModelAdapter, Rewritten, Segment, TowerInput
from relax_core.interfaces.stage import Stage
from relax_core.interfaces.trainer import TRAINER_COLUMNS, VALUES, Cut, StepResult, Trainer, Transport

__all__ = [
    "POOLS",
    "TRAINER_COLUMNS",
    "VALUES",
    "About",
    "Algorithm",
    "Batch",
    "Columns",
    "Completion",
    "Component",
    "ComponentConfig",
    "Configurable",
    "Cut",
    "Engine",
    "Environment",
    "Extended",
    "Interrupt",
    "Loss",
    "Member",
    "Modality",
    "ModelAdapter",
    "Outputs",
    "Pool",
    "Request",
    "Reward",
    "RewardValue",
    "Rewritten",
    "Row",
    "ScoredGroup",
    "Segment",
    "Stage",
    "StepResult",
    "Streaming",
    "TowerInput",
    "Trainer",
    "Transport",
]
