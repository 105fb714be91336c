"""The conformance checks of engines."""
from relax_core.testing.engine_checks import check_engine
from relax_core.torch.config import EngineConfig
from relax_core.torch.engine import TorchEngine

def test_embedded():
    check_engine(lambda setup: TorchEngine(EngineConfig(device="cpu"), setup))
