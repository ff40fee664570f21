"""Small arithmetic: answered directly, or worked out digit by digit while thinking."""

from __future__ import annotations

from random import Random

from halocline.training.item import Item, assistant, user
from halocline.training.lessons.mode import choose_mode, preamble
from halocline.training.split import Split, draw, random_for

__all__ = ["add_steps", "make_sum", "multiply_steps", "subtract_steps"]

_ASK = {
    "add": ("What is {a}+{b}?", "What is {a} + {b}?", "What is {a} plus {b}?", "{a}+{b}", "Add {a} and {b}."),
    "subtract": ("What is {a}-{b}?", "What is {a} - {b}?", "What is {a} minus {b}?", "{a}-{b}", "Take {b} from {a}."),
    "multiply": ("What is {a}*{b}?", "What is {a} times {b}?", "{a}*{b}"),
    "compare": ("Which is larger, {a} or {b}?",),
}
_DIRECT = ("add", "add", "add", "subtract", "subtract", "compare")
_WORKED_OUT = ("add", "add", "add", "subtract", "subtract", "multiply", "compare")


def add_steps(a: int, b: int) -> str:
    """Write out a + b from the last digit to the first, the carry as a third term."""
    left, right = str(a)[::-1], str(b)[::-1]
    steps, carry = [], 0
    for i in range(max(len(left), len(right))):
        terms = [digits[i] for digits in (left, right) if i < len(digits)]
        if carry:
            terms.append("1")
        total = sum(map(int, terms))
        steps.append(f"{'+'.join(terms)}={total}")
        carry = total // 10
    return ", ".join(steps)


def subtract_steps(a: int, b: int) -> str:
    """Write out a - b (a >= b) from the last digit to the first, a borrow as a middle term."""
    left, right = str(a)[::-1], str(b)[::-1]
    steps, borrow = [], 0
    for i, digit in enumerate(left):
        take = int(right[i]) if i < len(right) else 0
        have = int(digit)
        lend = have - borrow < take
        top = have + 10 if lend else have
        steps.append(f"{top}{'-1' if borrow else ''}-{take}={top - borrow - take}")
        borrow = int(lend)
    return ", ".join(steps)


def multiply_steps(a: int, b: int) -> str:
    """Write out a * b as repeated addition."""
    return ", ".join(f"{a * i}+{a}={a * (i + 1)}" for i in range(1, b))


def _operands(rng: Random, operation: str, thinking: bool) -> tuple[int, int]:
    if operation == "multiply":
        return rng.randint(2, 20), rng.randint(2, 5)
    top = rng.choice((20, 100, 1000, 1000)) if thinking else rng.choice((10, 20, 100, 100, 100))
    a, b = rng.randrange(top), rng.randrange(top)
    if operation == "subtract" and a < b:
        a, b = b, a
    if operation == "compare" and a == b:
        b += 1
    return a, b


def _solve(operation: str, a: int, b: int) -> tuple[int, str]:
    """Return the result and its working."""
    if operation == "add":
        return a + b, add_steps(a, b)
    if operation == "subtract":
        return a - b, subtract_steps(a, b)
    if operation == "multiply":
        return a * b, multiply_steps(a, b)
    return max(a, b), f"{max(a, b)} is larger than {min(a, b)}"


def make_sum(seed: int, index: int, split: Split) -> Item:
    """Return one exercise in arithmetic."""
    rng = random_for(seed, "sums", split, index)
    thinking, effort = choose_mode(rng, split, 0.5)

    def problem(source: Random) -> tuple[tuple[str, int, int], str]:
        operation = source.choice(_WORKED_OUT if thinking else _DIRECT)
        a, b = _operands(source, operation, thinking)
        low, high = sorted((a, b))
        return (operation, a, b), f"{operation}:{low}:{high}"

    (operation, a, b), key = draw(rng, split, problem)
    result, steps = _solve(operation, a, b)
    return Item(
        lesson="sums",
        kind="worked_out" if thinking else "direct",
        messages=(*preamble(rng, split), user(rng.choice(_ASK[operation]).format(a=a, b=b))),
        reply=assistant(str(result), steps if thinking else None),
        keys=(key,),
        thinking=thinking,
        effort=effort,
    )
