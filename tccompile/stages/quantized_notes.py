"""What a plan says of its products in bytes."""

from __future__ import annotations

from tccompile.options import Options
from tccompile.quantize.calibration import Chosen, Cost
from tccompile.stages.quantize import without_float8


def quantization_notes(found: Chosen, options: Options) -> list[str]:
    """What is in bytes, what that costs and saves, and why the other products are not."""
    whole, some = len(found.layers) + len(found.floats), f"{len(found.layers)}"
    if options.quantize == "auto" and found.layers:
        counts = {"int8": len(found.layers) - len(found.float8), "fp8": len(found.float8)}
        some = " and ".join(f"{count} in {name}" for name, count in counts.items() if count)
    head = f"{options.quantize}: {some} of {whole} products"
    if found.layers:
        notes = [f"{head}; outputs are off by {_error_of(found, options)}; by estimates {_saved(found, options)}"]
    else:
        notes = [f"{head}: {'all is in fp16, or in fp32 where mixed has it' if whole else 'the model has none'}"]
    if options.quantize == "auto" and (without := without_float8(options.archs)):
        notes.append(f"auto is without fp8, which Tensor Cores of {', '.join(without)} do not multiply: --arch names others")
    if options.quantize == "auto" and found.float8 and len(found.float8) < len(found.layers):
        notes.append(f"in fp8: {', '.join(sorted(found.float8))}")
    named = "bytes" if options.quantize == "auto" else options.quantize
    for reason in dict.fromkeys(sorted(found.floats.values())):
        names = sorted(name for name, why in found.floats.items() if why == reason)
        notes.append(f"not in {named}, since {reason}: {', '.join(names)}")
    return [*notes, *_costs(found)]


def _costs(found: Chosen) -> list[str]:
    """What each format would cost and save: everywhere, and by what reads each activation."""
    wholes: dict[str, Cost] = {}
    for cost in found.costs:
        wholes.setdefault(cost.format, cost)
    notes = [
        f"all {len(c.layers)} products that may be in {name}: new inputs would be off by about {c.error:.1e}; {_time_of(c)}"
        for name, c in wholes.items()
    ]
    notes += ["each product with all others in floats, the largest error first:"] if wholes else []
    done, in_float8 = {*found.layers}, {*found.float8}
    for cost in (c for c in found.costs if c is not wholes[c.format]):
        first = cost.layers[0]
        name = "fp8" if first in in_float8 else "int8" if first in done else "fp16"
        alone = f"{cost.error:.1e} off in {cost.format}, {_time_of(cost)}"
        notes.append(f"  {alone}; is in {name}: {', '.join(cost.layers)}")
    return notes


def _time_of(cost: Cost) -> str:
    return f"{abs(cost.saves):.1f} µs {'faster' if cost.saves > 0 else 'slower'}"


def _error_of(found: Chosen, options: Options) -> str:
    if not found.runs:
        said = f"about {found.off.expected:.1e}, estimated by what was calibrated for other builds"
        return f"{said}: --calibrate DATA.npz measures it"
    examples = f"{found.runs} example{'s' if found.runs > 1 else ''} of the data"
    new = f"new ones are expected to be within {found.off.expected:.1e}"
    if found.off.own is not None:
        new = f"by {options.metric} {found.off.own:.3g}"
    return f"{found.off.largest:.1e} on {examples}, {found.held or 'none'} of them held back from calibration; {new}"


def _saved(found: Chosen, options: Options) -> str:
    """What bytes save on each generation, all entries together."""
    entries = f" for all {len(options.entries)} entries" if len(options.entries) > 1 else ""
    return ", ".join(f"{b:.1f} µs in place of {a:.1f} on {arch}" for arch, (a, b) in found.times.items()) + entries
