"""A stand-in for torchvision, for tests: any name can be imported from it and its submodules, and none does anything.

SGLang and transformers import names from it whether or not a picture is ever read; its published builds want another
build of torch than the CPU's.
"""

import importlib.abc
import importlib.machinery
import sys

__version__ = "0.28.0"


class _Names(type):
    """A class whose attributes are their own names, as an enumeration of strings has them."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return name


def _anything(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Names(name, (), {})


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every ``torchvision.…`` and fills it with placeholders."""

    def find_spec(self, fullname, path=None, target=None):
        if not fullname.startswith(f"{__name__}."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module):
        module.__getattr__ = _anything


sys.meta_path.append(_Submodules())
__getattr__ = _anything
