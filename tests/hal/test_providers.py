"""Where a library comes from: versions, owners of a module, the trap of a name. Distributions lie on a made-up path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from halocline.hal.inventory import Inventory, Package, local_inventory
from halocline.hal.op import Provider
from halocline.hal.providers import choose_provider, provider_problem

Install = Callable[..., Path]

SGL = Provider(distribution="sglang-kernel", versions=">=0.4.3,<0.5", module="sgl_kernel")
SGL_MLA = Provider(distribution="sgl-flash-mla", versions=">=1.0.0,<1.1", module="flash_mla")
OTHER_MLA = Provider(distribution="tokenspeed-flashmla", versions=">=1.0.0.post20260615", module="flash_mla")
AITER = Provider(distribution="amd-aiter", versions=">=0.1.8", module="aiter")


def read(site: Path, *providers: Provider) -> Inventory:
    return local_inventory({p.module for p in providers}, {p.distribution for p in providers}, path=[str(site)])


def test_an_empty_machine_owns_nothing(tmp_path: Path) -> None:
    assert read(tmp_path, SGL, SGL_MLA).packages == {}


@pytest.mark.parametrize("record", [True, False])
def test_version_and_owner_are_read_without_importing(install: Install, record: bool) -> None:
    site = install("sglang-kernel", "0.4.5", {"sgl_kernel": "raise SystemExit('imported')"}, record=record)
    found = read(site, SGL)
    assert found.find("SGLang_Kernel") == Package(
        distribution="sglang-kernel", version="0.4.5", modules=("sgl_kernel",)
    )
    assert provider_problem(SGL, found) is None


def test_homes_are_tried_in_order(install: Install) -> None:
    site = install("sgl-flash-mla", "1.0.0", {"flash_mla": ""})
    chosen, reasons = choose_provider((SGL, SGL_MLA), read(site, SGL, SGL_MLA))
    assert (chosen, reasons) == (SGL_MLA, ())
    install("sglang-kernel", "0.4.5", {"sgl_kernel": ""})
    chosen, _ = choose_provider((SGL, SGL_MLA), read(site, SGL, SGL_MLA))
    assert chosen == SGL


def test_a_kernel_without_providers_needs_none() -> None:
    assert choose_provider((), Inventory()) == (None, ())


def test_missing_too_old_and_broken_are_three_messages(install: Install) -> None:
    missing = provider_problem(SGL, Inventory())
    assert missing == "package sglang-kernel is not installed; pip install 'halocline[cuda]'"
    old = provider_problem(SGL, read(install("sglang-kernel", "0.3.21", {"sgl_kernel": ""}), SGL))
    assert old is not None
    assert old.startswith("sglang-kernel 0.3.21 is installed, >=0.4.3,<0.5 is needed; pip install")
    broken = provider_problem(
        SGL,
        Inventory.of(
            [Package(distribution="sglang-kernel", version="0.4.5", modules=("sgl_kernel",))],
            import_errors={"sgl_kernel": "ImportError: undefined symbol _ZN5torch"},
        ),
    )
    assert broken is not None
    assert "importing sgl_kernel fails: ImportError: undefined symbol _ZN5torch" in broken


def test_two_owners_of_one_module_are_refused_by_name(install: Install) -> None:
    install("sgl-flash-mla", "1.0.0", {"flash_mla": ""})
    site = install("tokenspeed-flashmla", "1.0.0.post20260615", {"flash_mla": ""})
    chosen, reasons = choose_provider((SGL_MLA, OTHER_MLA), read(site, SGL_MLA, OTHER_MLA))
    assert chosen is None
    assert len(reasons) == 2
    assert all("owned by sgl-flash-mla and tokenspeed-flashmla at once" in reason for reason in reasons)


def test_two_owners_of_deep_gemm_leave_another_home_usable(install: Install) -> None:
    """One module in doubt does not spoil a library that lies elsewhere, too."""
    install("sgl-flash-mla", "1.0.0", {"flash_mla": ""})
    install("tokenspeed-flashmla", "1.0.0.post20260615", {"flash_mla": ""})
    site = install("sglang-kernel", "0.4.5", {"sgl_kernel": ""})
    chosen, _ = choose_provider((SGL, SGL_MLA), read(site, SGL, SGL_MLA, OTHER_MLA))
    assert chosen == SGL


def test_an_owner_that_no_manifest_knows_counts(install: Install) -> None:
    install("sgl-flash-mla", "1.0.0", {"flash_mla": ""})
    site = install("someones-fork", "7", {"flash_mla": ""})
    assert [p.distribution for p in read(site, SGL_MLA).owners("flash_mla")] == ["sgl-flash-mla", "someones-fork"]


def test_the_unrelated_aiter_is_not_amds(install: Install) -> None:
    site = install("aiter", "0.13.20191203", {"aiter": ""})
    problem = provider_problem(AITER, read(site, AITER))
    assert problem is not None
    assert "package amd-aiter is not installed" in problem
    assert "the module aiter here belongs to aiter 0.13.20191203, another library" in problem


def test_amds_aiter_beside_the_unrelated_one_is_refused(install: Install) -> None:
    install("aiter", "0.13.20191203", {"aiter": ""})
    site = install("amd-aiter", "0.1.9", {"aiter": ""})
    problem = provider_problem(AITER, read(site, AITER))
    assert problem is not None
    assert "owned by aiter and amd-aiter at once" in problem


def test_the_release_that_predates_the_model_is_too_old(install: Install) -> None:
    problem = provider_problem(AITER, read(install("amd-aiter", "0.1.7.post2.dev18", {"aiter": ""}), AITER))
    assert problem is not None
    assert "0.1.7.post2.dev18 is installed, >=0.1.8 is needed" in problem
