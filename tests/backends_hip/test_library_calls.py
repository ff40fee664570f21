"""The recorded signatures and the check at start-up, with functions made for the purpose."""

from __future__ import annotations

import inspect
import sys
from types import SimpleNamespace

import pytest
from library_fakes import make_function

from halocline.backends_hip import library_calls
from halocline.backends_hip.library_calls import CALLS, LibraryCall, check_signature, library_function
from halocline.hal.errors import KernelImportError

MHC_POST = next(call for call in CALLS if call.function == "mhc_post")
DECODE = next(call for call in CALLS if call.function == "pa_decode_sparse")


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.function)
def test_a_function_of_the_recorded_form_passes(call: LibraryCall) -> None:
    check_signature(call, make_function(call.parameters, lambda _: None))


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.function)
def test_further_parameters_with_defaults_pass(call: LibraryCall) -> None:
    more = f"{call.parameters}, added=None"
    check_signature(call, make_function(more, lambda _: None))


def test_a_default_that_was_not_recorded_may_be_anything() -> None:
    gemm = next(call for call in CALLS if call.function == "gemm_a8w8_blockscale")

    function = make_function(gemm.parameters.replace("dtype=...", "dtype='half'"), lambda _: None)
    check_signature(gemm, function)


CHANGED = [
    (MHC_POST, "out, x, residual, post_layer_mix", "comb_res_mix is gone"),
    (MHC_POST, "x, out, residual, post_layer_mix, comb_res_mix", "the order is x, out, residual"),
    (MHC_POST, "out, x, residual, post_layer_mix, comb_res_mix, tile", "tile is new and has no default"),
    (MHC_POST, "out, x, residual, post_layer_mix, *, comb_res_mix", "comb_res_mix is keyword-only"),
    (DECODE, DECODE.parameters.replace("has_invalid=True", "has_invalid=False"), "has_invalid has another default"),
    (DECODE, DECODE.parameters.replace("kv_indptr", "kv_offsets"), "kv_indptr is gone; kv_offsets is new"),
]


@pytest.mark.parametrize(("call", "parameters", "change"), CHANGED, ids=[change for *_, change in CHANGED])
def test_a_changed_signature_is_refused_with_both_shown(call: LibraryCall, parameters: str, change: str) -> None:
    function = make_function(parameters, lambda _: None)
    with pytest.raises(KernelImportError) as caught:
        check_signature(call, function)
    text = str(caught.value)
    assert f"{call.module}.{call.function} has changed since it was recorded" in text
    assert call.parameters in text
    assert str(inspect.signature(function)) in text
    assert change in text


def test_a_change_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapter's module asks when it is imported, which is when its kernel is bound."""
    module = SimpleNamespace(
        mhc_pre=make_function("residual, fn", lambda _: None), mhc_post=make_function(MHC_POST.parameters, print)
    )
    monkeypatch.setitem(sys.modules, MHC_POST.module, module)
    monkeypatch.setattr(library_calls, "import_provider", lambda _: None)
    monkeypatch.delitem(sys.modules, "halocline.backends_hip.hyper_connection_aiter", raising=False)
    with pytest.raises(KernelImportError, match=r"aiter\.ops\.mhc\.mhc_pre has changed since it was recorded"):
        __import__("halocline.backends_hip.hyper_connection_aiter")


def test_a_missing_function_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MHC_POST.module, SimpleNamespace())
    monkeypatch.setattr(library_calls, "import_provider", lambda _: None)
    with pytest.raises(KernelImportError, match=r"aiter\.ops\.mhc has no mhc_post"):
        library_function("mhc_post")


def test_without_the_library_the_provider_says_so() -> None:
    with pytest.raises(KernelImportError, match="package amd-aiter is not installed"):
        library_function("mhc_post")


def test_each_function_is_recorded_once() -> None:
    assert len({call.function for call in CALLS}) == len(CALLS)
