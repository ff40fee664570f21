"""From a table to callables: what is imported, and how a failing import is told."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from halocline.hal.backend import Manifest, load_backend, load_manifests
from halocline.hal.errors import ConfigError, KernelImportError, OverrideError
from halocline.hal.formats import recipe
from halocline.hal.inventory import Inventory, Package
from halocline.hal.op import KernelSpec, Provider
from halocline.hal.profiles import cpu_profile, profile
from halocline.hal.runtime import import_provider, load_ops, load_target
from halocline.hal.selection import bind
from halocline.hal.settings import Settings
from halocline.hal.stages import Policy
from halocline.hal.startup import choose_kernels
from halocline.hal.table import Bound, KernelTable
from halocline.models.deepseek_v4.presets import preset
from halocline.models.deepseek_v4.requests import kernel_requests

LIBRARY = Provider(distribution="fastnorm", versions=">=1.2,<2", module="fastnorm")
OP = "norm.rms_norm"


@pytest.fixture
def table(specs: tuple[KernelSpec, ...]) -> KernelTable:
    """The tiny model on the CPU."""
    return bind(
        kernel_requests(preset("tiny"), recipe("recipe")),
        specs=specs,
        device=cpu_profile(),
        inventory=Inventory(),
        policy=Policy(),
    )


def test_a_layer_gets_the_kernels_of_its_ops(table: KernelTable) -> None:
    csa, window = load_ops(table, 1), load_ops(table, 0)
    assert csa.indexer.select.__name__ == "select_reference"
    assert csa.gemm.prepare_linear.__name__ == "prepare_linear_reference"
    assert csa.attention.prepare_output.__name__ == "prepare_linear_reference"
    assert window.moe.route_by_hash.__name__ == "route_by_hash_reference"
    with pytest.raises(AssertionError, match="contract"):  # a layer without an indexer asks for none
        window.indexer.select(None, None, first_token=0, num_kept=1, page_rows=1)  # type: ignore[arg-type]
    assert load_ops(table).sampling.sample.__name__ == "sample_reference"


def bound(make_spec: Callable[..., KernelSpec], target: str) -> Bound:
    spec = make_spec("fast", target=target, providers=(LIBRARY,))
    return Bound(spec=spec, provider=LIBRARY, version="1.5", status="run")


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("import nothing_of_the_kind", "ModuleNotFoundError: No module named 'nothing_of_the_kind'"),
        ("raise ImportError('libcudart.so.13: cannot open')", "ImportError: libcudart.so.13: cannot open"),
        ("raise RuntimeError('needs a driver')", "RuntimeError: needs a driver"),
        ("other = 1", "AttributeError"),
        ("kernel = 3", "a int"),
    ],
)
def test_an_import_that_fails_is_chained_with_versions_and_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_spec: Callable[..., KernelSpec], source: str, shown: str
) -> None:
    name = f"toy_kernel_{abs(hash(source))}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(KernelImportError) as caught:
        load_target(f"{name}:kernel", bound(make_spec, f"{name}:kernel"))
    message = str(caught.value)
    assert f"the kernel {OP}=fast cannot be loaded" in message
    assert "package  fastnorm 1.5, needed >=1.2,<2" in message
    assert shown in message
    assert f"--kernel '{OP}=!fast' to go without it" in message
    assert caught.value.exit_code == 2
    if source.startswith(("import", "raise")):
        assert isinstance(caught.value.__cause__, Exception)
        assert shown.partition(": ")[2] in str(caught.value.__cause__)


def test_the_library_that_selection_chose_is_the_one_that_is_imported(
    install: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    second = Provider(distribution="fastnorm-fork", versions=">=1", module="fastnorm_fork")
    site = install("fastnorm", "1.0", {"fastnorm": "WHICH = 'too old'"})
    install("fastnorm-fork", "1.1", {"fastnorm_fork": "WHICH = 'fork'"})
    monkeypatch.syspath_prepend(str(site))
    assert import_provider((LIBRARY, second)).WHICH == "fork"


def test_a_library_without_any_provider_says_which_were_tried() -> None:
    nowhere = Provider(distribution="no-such-thing", versions=">=1", module="no_such_thing")
    with pytest.raises(KernelImportError, match="package no-such-thing is not installed"):
        import_provider((nowhere,))


def test_a_compared_op_needs_somebody_to_report_to(specs: tuple[KernelSpec, ...], make_spec: Any) -> None:
    settings = Settings.read({})
    planted = make_spec("planted", rank=9)

    def describe(*_: Any) -> Any:
        return kernel_requests(preset("tiny"), recipe("recipe"))

    manifests = [*load_manifests(), Manifest(name="planted", vendor="", specs=(planted,))]
    flags = [f"{OP}=compare(reference,planted)"]
    planted = replace(planted, formats={"compute": ("bfloat16",)})
    chosen = choose_kernels(
        describe,
        settings=settings,
        flags=flags,
        device=cpu_profile(),
        inventory=Inventory(),
        manifests=manifests,
    )
    assert chosen.watch is not None
    with pytest.raises(ConfigError, match="the table has no watch"):
        load_ops(replace(chosen, watch=None), 0)
    with pytest.raises(OverrideError, match="cannot run in captured graphs"):
        choose_kernels(
            describe,
            settings=settings,
            flags=flags,
            device=cpu_profile(),
            inventory=Inventory(),
            manifests=manifests,
            graphs=True,
        )


def test_with_no_environment_each_device_behaves(specs: tuple[KernelSpec, ...]) -> None:
    """Nothing has to be set for any architecture to be understood."""
    everything = Inventory.of([Package(distribution="triton", version="3.6.0", modules=("triton",))])
    for name, found in {"cpu": "paged", "sm_90": "ragged", "gfx942": "ragged"}.items():
        device = profile(name).device
        seen: list[Any] = []

        def describe(where: Any, layout: Any, seen: list[Any] = seen) -> Any:
            seen.append((where, layout))
            return []

        table = choose_kernels(
            describe, settings=Settings.read({}), device=device, inventory=everything, manifests=load_manifests()
        )
        assert seen == [(device, found)]
        assert table.notes == ()


# ---- backends ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("raise ImportError('broken')", "found     broken"),
        ("OTHER = 1", "has no attribute 'MANIFEST'"),
        ("MANIFEST = {}", "found     a dict"),
    ],
)
def test_an_entry_point_that_leads_to_no_manifest_is_named(
    install: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, source: str, found: str
) -> None:
    module = f"toy_manifest_{abs(hash(source))}"
    entry = f"[halocline.backends]\ntoy = {module}:MANIFEST\n"
    site = install("toy", "1.0", {module: source}, entry_points=entry)
    monkeypatch.syspath_prepend(str(site))
    with pytest.raises(ConfigError) as caught:
        load_manifests(path=[str(site)])
    assert "the backend 'toy' cannot be loaded" in str(caught.value)
    assert f"entry     halocline.backends: toy = {module}:MANIFEST" in str(caught.value)
    assert found in str(caught.value)


def test_a_backend_brings_its_runtime_services_when_its_device_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "toy_runtime.py").write_text(
        "class Runtime:\n    def memory(self):\n        return (1, 2)\nRUNTIME = Runtime()"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    manifest = Manifest(name="toy", vendor="nvidia", specs=(), runtime="toy_runtime:RUNTIME")
    backend = load_backend([manifest], "nvidia")
    assert backend is not None
    assert backend.memory() == (1, 2)
    assert load_backend([manifest], "amd") is None
    broken = replace(manifest, runtime="toy_runtime:NOTHING")
    with pytest.raises(KernelImportError, match="the runtime services for nvidia cannot be loaded"):
        load_backend([broken], "nvidia")


def test_libraries_know_their_cache_folder_before_they_are_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DG_JIT_CACHE_DIR", "")  # put back after the test
    for variable in ("TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "TILELANG_CACHE_DIR"):
        monkeypatch.setenv(variable, "/theirs")
    monkeypatch.delenv("DG_JIT_CACHE_DIR")
    choose_kernels(
        lambda *_: kernel_requests(preset("tiny"), recipe("recipe")),
        settings=Settings.read({"HALOCLINE_CACHE_DIR": str(tmp_path)}),
        device=cpu_profile(),
        inventory=Inventory(),
    )
    assert os.environ["DG_JIT_CACHE_DIR"] == str(tmp_path / "deep_gemm")
    assert os.environ["TRITON_CACHE_DIR"] == "/theirs"
