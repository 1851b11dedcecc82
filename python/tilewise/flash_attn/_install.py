"""`install`: lets code that says `import flash_attn` find this package, its version and its metadata.

A finder at the front of sys.meta_path answers for one name and the modules below it, and nothing else. What it gives are
the modules of tilewise themselves, so there is one copy of every function under both names.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import pathlib
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

from .._errors import Error


class AlreadyInstalledError(Error, ImportError):
    """`install` was called where the real package is."""


def install() -> None:
    """Makes `import flash_attn` and `import flash_attn.…` mean `tilewise.flash_attn` in this process.

    importlib.metadata finds a distribution flash-attn of version 2.8.4 too, which is what other libraries ask for. Call it
    before they are imported: some of them ask once and remember. Calling it again does nothing. A module that is not
    there (flash_attn.modules, flash_attn_2_cuda) stays missing.

    Raises:
        ImportError: where a flash_attn exists already, imported or not; nothing has been changed then.
    """
    install_as("flash_attn", "tilewise.flash_attn", "flash-attn", "2.8.4")


def install_as(name: str, module: str, distribution: str, version: str) -> None:
    """Makes the name mean a module of tilewise, with metadata of a distribution."""
    if any(isinstance(finder, _Finder) and finder.name == name for finder in sys.meta_path):
        return
    place = _place_of(name, distribution)
    if place:
        raise AlreadyInstalledError(
            f"install(): got a {name} that exists, {place}; allowed: none. Uninstall it first (pip uninstall "
            f"{distribution}), or import {module} by its own name."
        )
    sys.meta_path.insert(0, _Finder(name, module, distribution, version))


def _place_of(name: str, distribution: str) -> str:
    """Where a package of this name, imported, importable or only installed, is. "" = nowhere."""
    found = sys.modules.get(name)
    if found is not None:
        return f"imported from {getattr(found, '__file__', None) or 'nowhere'}"
    spec = importlib.util.find_spec(name)
    if spec is not None:
        return f"in {spec.origin or ', '.join(spec.submodule_search_locations or ())}"
    try:
        return f"as the distribution {distribution} {importlib.metadata.version(distribution)}"
    except importlib.metadata.PackageNotFoundError:
        return ""


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, module: str, distribution: str, version: str) -> None:
        self.name, self._module = name, module
        self._distribution = _Distribution(name, distribution, version)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name and not fullname.startswith(self.name + "."):
            return None
        own = self._module + fullname[len(self.name) :]
        real = importlib.util.find_spec(own) if _has_parents(own) else None
        if real is None or own.rpartition(".")[2].startswith("_"):
            # Said here, or the ordinary finders would look into the folder and load a second copy.
            raise ModuleNotFoundError(f"No module named {fullname!r} (tilewise has none of this name)", name=fullname)
        package = real.submodule_search_locations is not None
        return importlib.machinery.ModuleSpec(fullname, _Loader(own), origin=real.origin, is_package=package)

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterable[importlib.metadata.Distribution]:
        wanted = None if context is None else context.name
        if wanted is None or _normal(wanted) == _normal(self._distribution.metadata["Name"]):
            yield self._distribution


def _has_parents(module: str) -> bool:
    """Whether the package that a module is in exists: find_spec raises if not."""
    parent = module.rpartition(".")[0]
    return importlib.util.find_spec(parent) is not None


def _normal(name: str) -> str:
    return name.lower().replace("-", "_").replace(".", "_")


class _Loader(importlib.abc.Loader):
    """Puts a module of tilewise under its other name."""

    def __init__(self, module: str) -> None:
        self._module = module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        sys.modules[module.__spec__.name] = importlib.import_module(self._module)


class _Distribution(importlib.metadata.Distribution):
    """What importlib.metadata says of the package."""

    def __init__(self, name: str, distribution: str, version: str) -> None:
        self._texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
            "Summary: This interface, provided by tilewise\n",
            "top_level.txt": name + "\n",
        }

    def read_text(self, filename: str) -> str | None:
        return self._texts.get(filename)

    def locate_file(self, path: str | os.PathLike[str]) -> Any:
        return pathlib.Path(__file__).parent / path
