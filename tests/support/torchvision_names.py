"""Functions of transformers' image processors that need torchvision, which is not there."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import pytest
from transformers import image_processing_backends  # before there is something like torchvision


def image_processing(model: str) -> Any:
    """transformers' module of a model's processor; of torchvision it has nothing but names."""
    assert image_processing_backends.TorchvisionBackend
    theirs = f"transformers.models.{model}.image_processing_{model}"
    transforms = "torchvision.transforms.v2"
    functional = ModuleType(f"{transforms}.functional")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("torchvision", "torchvision.transforms", transforms):
            patch.setitem(sys.modules, name, ModuleType(name))
        patch.setitem(sys.modules, functional.__name__, functional)
        patch.setattr(sys.modules[transforms], "functional", functional, raising=False)
        made = importlib.import_module(theirs)
        del sys.modules[theirs]
    return made
