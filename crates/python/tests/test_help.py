"""The texts of help() and the types seen by type checkers."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
import typing

import pytest

import spinio

MODULES = ["spinio", "spinio.emulated", "spinio.gaia", "spinio.net", "spinio.nvmmu", "spinio.safetensors", "spinio.fsspec", "spinio.zarr"]


@pytest.mark.parametrize("name", MODULES)
def test_public_names_have_docstrings(name):
    module = pytest.importorskip(name) if name in MODULES[6:] else importlib.import_module(name)
    assert inspect.getdoc(module)
    for public in module.__all__:
        thing = getattr(module, public)
        if not callable(thing):
            continue
        assert thing.__doc__, public
        ours = {n: m for n, m in vars(thing).items() if not n.startswith("_")} if inspect.isclass(thing) else {}
        for n, member in ours.items():
            assert inspect.getdoc(getattr(thing, n)), f"{public}.{n}"


def test_old_zarr_is_an_import_error():
    code = "import sys, types; sys.modules['zarr'] = types.ModuleType('zarr'); import spinio.zarr"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert said.returncode == 1 and "ModuleNotFoundError: spinio.zarr needs Zarr 3" in said.stderr


def test_dictionaries_have_the_keys_of_the_stub(tmp_path, data):
    stub = inspect.getsourcefile(spinio).replace("__init__.py", "_spinio.pyi")
    names: dict[str, typing.Any] = {}
    exec(compile("from __future__ import annotations\n" + open(stub).read(), stub, "exec"), names)

    def keys(kind):
        return names[kind].__required_keys__

    array = spinio.emulated.empty(100)
    with spinio.open(data) as f:
        f.pread(array, 0)
    assert set(spinio.describe(array)) == keys("_Described")
    stats = spinio.stats()
    assert set(stats) == keys("_Stats") and set(stats["read"]) == set(stats["batch"]) == keys("_Calls")
    assert all(set(route) == keys("_Route") for route in stats["routes"]) and stats["routes"]
    assert all(set(refused) == keys("_Refused") for refused in stats["refused"])
    with spinio.net.open("emulated") as net:
        assert set(net.stats()) == keys("_NetStats")
    with spinio.nvmmu.session(tmp_path / "out") as s:
        s.download(array)
    assert set(s.report) == keys("_Report")
