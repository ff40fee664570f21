"""Overrides: one syntax for flag, environment and file, strict about every name in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from halocline.hal.errors import OverrideError
from halocline.hal.op import KernelSpec
from halocline.hal.override_checks import check_overrides
from halocline.hal.overrides import Override, collect_overrides, parse_override
from halocline.hal.profiles import profile
from halocline.hal.request import KernelRequest
from halocline.hal.settings import Settings

SPARSE = "attention.sparse_decode"


def parse(text: str) -> Override:
    return parse_override(text, source="flag", origin="--kernel", precedence=5)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{SPARSE}=flashmla", {"action": "strict", "kernels": ("flashmla",), "pattern": SPARSE}),
        (f"{SPARSE}?=flashmla", {"action": "prefer", "kernels": ("flashmla",)}),
        ("attention.*=!aiter", {"action": "ban", "kernels": ("aiter",), "pattern": "attention.*"}),
        ("moe.experts[a2a=none]=triton", {"traits": {"a2a": "none"}, "action": "strict"}),
        ("moe.experts[a2a=none, tp_size=8]=triton", {"traits": {"a2a": "none", "tp_size": "8"}}),
        (f"{SPARSE}@layers=0-3=reference", {"layers": (0, 1, 2, 3), "kernels": ("reference",)}),
        (f"{SPARSE}@layers=7,0-1=reference", {"layers": (0, 1, 7)}),
        (f"{SPARSE}[num_heads=64]@layers=2?=triton", {"layers": (2,), "action": "prefer"}),
        (f"{SPARSE}=compare(tilelang,reference)", {"action": "compare", "kernels": ("tilelang", "reference")}),
        (f"{SPARSE}=compare( auto , triton )", {"action": "compare", "kernels": ("auto", "triton")}),
    ],
)
def test_the_syntax(text: str, expected: dict[str, Any]) -> None:
    found = parse(text)
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "OP=KERNEL"),
        (SPARSE, "OP=KERNEL"),
        (f"{SPARSE}=", "OP=KERNEL"),
        ("=flashmla", "OP=KERNEL"),
        (f"{SPARSE}=flash mla", "OP=KERNEL"),
        (f"{SPARSE}?=!aiter", "it neither bans nor compares"),
        (f"{SPARSE}?=compare(a,b)", "it neither bans nor compares"),
        (f"{SPARSE}=!compare(a,b)", "a ban takes one kernel name"),
        (f"{SPARSE}=compare(triton,triton)", "compares a kernel with itself"),
        (f"{SPARSE}=compare(a,b,c)", "OP=KERNEL"),
        (f"{SPARSE}@layers=3-1=triton", "found '3-1'"),
        (f"{SPARSE}@layers=1,,2=triton", "found ''"),
        (f"{SPARSE}@layers=0-9999999999=triton", "found '0-9999999999'"),
        ("moe.experts[a2a]=triton", "found 'a2a'"),
        ("moe.experts[a2a=]=triton", "found 'a2a='"),
    ],
)
def test_what_does_not_parse_says_what_was_expected(text: str, complaint: str) -> None:
    with pytest.raises(OverrideError) as caught:
        parse(text)
    message = str(caught.value)
    assert complaint in message
    assert "--kernel" in message
    assert caught.value.exit_code == 2


def test_a_comparison_cannot_be_nested() -> None:
    """The syntax has no way to write it, so recursion cannot be asked for."""
    with pytest.raises(OverrideError, match="cannot read"):
        parse(f"{SPARSE}=compare(compare(a,b),c)")


# ---- sources ----------------------------------------------------------------------------------------------------


def collect(device: str = "gfx942", flags: tuple[str, ...] = (), **variables: str) -> tuple[tuple[Override, ...], Any]:
    settings = Settings.read({f"HALOCLINE_{name.upper()}": text for name, text in variables.items()})
    return collect_overrides(flags=flags, settings=settings, device=profile(device).device)


def test_every_source_is_named(tmp_path: Path) -> None:
    file = tmp_path / "halocline.toml"
    file.write_text('kernels = ["norm.rms_norm=triton"]\n')
    settings = Settings.read(
        {
            "HALOCLINE_KERNELS": "gemm.linear=triton; moe.experts=!aiter ;",
            "HALOCLINE_HIP_BACKEND": "tilelang",
            "HALOCLINE_CONFIG": str(file),
        }
    )
    found, notes = collect_overrides(
        flags=["attention.plan=triton"],
        settings=settings,
        model_defaults=["moe.swiglu=triton"],
        device=profile("gfx942").device,
    )
    assert [(o.text, o.source) for o in found] == [
        ("attention.plan=triton", "flag"),
        ("gemm.linear=triton", "env"),
        ("moe.experts=!aiter", "env"),
        ("attention.*=tilelang", "env"),
        ("norm.rms_norm=triton", "file"),
        ("moe.swiglu=triton", "model"),
    ]
    weights = [o.precedence for o in found]
    assert weights == sorted(weights, reverse=True)
    assert notes == ()


def test_the_variable_for_amd_is_short_for_the_attention_ops() -> None:
    (override,), _ = collect(hip_backend="aiter")
    assert (override.pattern, override.action, override.kernels) == ("attention.*", "strict", ("aiter",))


def test_its_comparison_compares_what_auto_would_choose_with_triton() -> None:
    (override,), _ = collect(hip_backend="comparison")
    assert (override.action, override.kernels) == ("compare", ("auto", "triton"))


def test_its_auto_is_no_override() -> None:
    assert collect(hip_backend="auto") == ((), ())


@pytest.mark.parametrize("device", ["sm_90", "cpu"])
def test_off_amd_it_has_no_effect_and_says_so(device: str) -> None:
    found, notes = collect(device, hip_backend="tilelang")
    assert found == ()
    (note,) = notes
    assert "HALOCLINE_HIP_BACKEND=tilelang has no effect" in note


@pytest.mark.parametrize(
    "text", ["kernels = 'norm.rms_norm=triton'", "kernels = [1]", "kernel = ['a=b']", "kernels = [", "[kernels]\na = 1"]
)
def test_a_file_that_holds_something_else_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "halocline.toml"
    file.write_text(text)
    with pytest.raises(OverrideError, match=r"halocline\.toml"):
        collect(config=str(file))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OverrideError, match="cannot read the configuration file"):
        collect(config=str(tmp_path / "none.toml"))


# ---- names ------------------------------------------------------------------------------------------------------

MakeSpec = Callable[..., KernelSpec]


@pytest.fixture
def known(make_spec: MakeSpec) -> tuple[KernelSpec, ...]:
    return (
        make_spec("flashmla", op=SPARSE),
        make_spec("triton", op=SPARSE),
        make_spec("triton", op="attention.output"),
        make_spec("aiter", op="moe.experts", traits={"a2a": ("none", "mori")}),
        make_spec("triton", op="moe.experts"),
    )


REQUESTS = (
    KernelRequest(op=SPARSE, layers=(0, 1, 2)),
    KernelRequest(op="attention.output", layers=(0, 1, 2)),
    KernelRequest(op="moe.experts", layers=(0, 1, 2), traits={"a2a": "none", "tp_size": 8}),
)


@pytest.mark.parametrize(
    ("text", "nearest", "listed"),
    [
        ("attention.sparse_decod=triton", "attention.sparse_decode", "moe.experts"),
        ("atention.*=triton", None, "attention.sparse_decode"),
        (f"{SPARSE}=flashmia", "flashmla", "triton"),
        ("attention.*=aitre", None, "flashmla, triton"),
        ("moe.experts[a2=none]=triton", "a2a", "tp_size"),
        ("moe.experts[a2a=morii]=triton", "mori", "none"),
        ("moe.experts[tp_size=9]=triton", None, "8"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_and_the_known(
    known: tuple[KernelSpec, ...], text: str, nearest: str | None, listed: str
) -> None:
    with pytest.raises(OverrideError) as caught:
        check_overrides([parse(text)], known, REQUESTS)
    message = str(caught.value)
    assert "unknown" in message
    assert listed in message
    if nearest is not None:
        assert f"nearest  {nearest}" in message


def test_a_layer_that_the_model_has_not_is_refused(known: tuple[KernelSpec, ...]) -> None:
    with pytest.raises(OverrideError, match=r"layers are 0 to 2, asked for layer 3"):
        check_overrides([parse(f"{SPARSE}@layers=1-3=triton")], known, REQUESTS)


def test_a_pattern_lists_the_ops_that_have_no_such_kernel(known: tuple[KernelSpec, ...]) -> None:
    (note,) = check_overrides([parse("attention.*=flashmla")], known, REQUESTS)
    assert "no such kernel for" in note
    assert "attention.output" in note
    assert SPARSE not in note


def test_a_full_name_is_strict_about_the_kernel(known: tuple[KernelSpec, ...]) -> None:
    with pytest.raises(OverrideError, match="unknown kernel 'flashmla'"):
        check_overrides([parse("attention.output=flashmla")], known, REQUESTS)


def test_an_op_that_the_model_does_not_use_is_a_note(known: tuple[KernelSpec, ...], make_spec: MakeSpec) -> None:
    specs = (*known, make_spec("triton", op="norm.rms_norm"))
    (note,) = check_overrides([parse("norm.rms_norm=triton")], specs, REQUESTS)
    assert "does not use norm.rms_norm" in note


def test_two_choices_of_equal_weight_contradict_each_other(known: tuple[KernelSpec, ...]) -> None:
    with pytest.raises(OverrideError, match="was given, too"):
        check_overrides([parse(f"{SPARSE}=triton"), parse(f"{SPARSE}=flashmla")], known, REQUESTS)


def test_choices_for_disjoint_layers_do_not(known: tuple[KernelSpec, ...]) -> None:
    pair = [parse(f"{SPARSE}@layers=0=triton"), parse(f"{SPARSE}@layers=1-2=flashmla")]
    assert check_overrides(pair, known, REQUESTS) == ()


def test_auto_stands_in_comparisons_only(known: tuple[KernelSpec, ...]) -> None:
    with pytest.raises(OverrideError, match="auto stands for a kernel in compare"):
        check_overrides([parse(f"{SPARSE}=auto")], known, REQUESTS)
