"""Which distribution a kernel's library comes from, and every reason why one of them will not do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from halocline.hal.inventory import Inventory, canonical_name
from halocline.hal.op import Provider
from halocline.hal.versions import satisfies

__all__ = ["choose_provider", "provider_problem"]

# Where a distribution comes from when it is in no extra of ours; what is not named here is in halocline[cuda].
_HOMES = {
    "amd-aiter": "it comes with the ROCm image (the distribution called aiter is an unrelated library)",
    "pytorch-triton-rocm": "it comes with the ROCm build of torch",
    "sgl-flash-mla": "pip install --no-deps sgl-flash-mla==1.0.0",
    "tilelang": "pip install 'halocline[cuda]' or 'halocline[rocm]'",
    "sglang": "no kernel package carries it; pip install --no-deps sglang",
    "tokenspeed-deepgemm": "pip install --no-deps tokenspeed-deepgemm, instead of sgl-deep-gemm",
    "tokenspeed-flashmla": "pip install --no-deps tokenspeed-flashmla, instead of sgl-flash-mla",
    "torch": "pip install torch",
    "triton": "it comes with torch's GPU builds; pip install triton",
}


def choose_provider(providers: Sequence[Provider], inventory: Inventory) -> tuple[Provider | None, tuple[str, ...]]:
    """Takes the first provider that is installed, in range, importable and the sole owner of its module.

    Returns:
        The provider and no reasons; or None and one reason for each provider. A kernel without providers needs none.
    """
    reasons: list[str] = []
    for provider in providers:
        problem = provider_problem(provider, inventory, alternatives=providers)
        if problem is None:
            return provider, ()
        reasons.append(problem)
    return None, tuple(reasons)


def provider_problem(provider: Provider, inventory: Inventory, *, alternatives: Iterable[Provider] = ()) -> str | None:
    """Why a provider cannot be used, or None.

    Args:
        provider: The provider.
        inventory: What is installed.
        alternatives: Providers of the same library, whose ownership of the module is no surprise.
    """
    name, module = provider.distribution, provider.module
    found = inventory.find(name)
    owners = inventory.owners(module)
    if found is None:
        known = {canonical_name(other.distribution) for other in alternatives}
        strangers = [owner for owner in owners if canonical_name(owner.distribution) not in known]
        others = " and ".join(f"{owner.distribution} {owner.version}" for owner in strangers)
        claimed = f"; the module {module} here belongs to {others}, another library" if others else ""
        return f"package {name} is not installed{claimed}; {_how(provider)}"
    if not satisfies(found.version, provider.versions):
        remedy = f"pip install '{name}{provider.versions}'"
        return f"{name} {found.version} is installed, {provider.versions} is needed; {remedy}"
    if len(owners) > 1:
        names = " and ".join(owner.distribution for owner in owners)
        return f"the module {module} is owned by {names} at once; uninstall all but {name} and install that again"
    if module in inventory.import_errors:
        return f"{name} {found.version} is installed, but importing {module} fails: {inventory.import_errors[module]}"
    return None


def _how(provider: Provider) -> str:
    return _HOMES.get(canonical_name(provider.distribution), "pip install 'halocline[cuda]'")
