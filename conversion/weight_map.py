"""How tensors of a foreign checkpoint become this package's, as data that runs both ways. It knows no family.

A family gives a list of `Rule`s; here they are checked against what the file holds and what the model needs, and applied
one tensor at a time.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from modeling_xl.text import InputError

LISTED = 8  # names that an error lists


@dataclass(frozen=True)
class Rule:
    """target = the sources, joined along their first axis, with its rows in another order.

    sizes: rows of each source, where there are several. rows: row i of the target is row rows[i] of the joined sources.
    share: (i, n), the target is the i-th of n equal parts of the source's rows; rules of their own make the others. folded:
    whether the last two axes of each source are one here. transpose: whether each source lies transposed. add: added to each
    entry, in float32 at least, which the target then is of, since half precision would round it. constant: there is no
    source; the target is filled with this number, as where the foreign model has no bias.
    """

    target: str
    sources: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    rows: torch.Tensor | None = None
    share: tuple[int, int] | None = None
    folded: bool = False
    transpose: bool = False
    add: float = 0.0
    constant: float | None = None

    def forth(self, tensors: list[torch.Tensor], shape: torch.Size) -> torch.Tensor:
        """The target, of `shape`, from the sources."""
        if self.constant is not None:
            return torch.full(shape, self.constant)
        if self.share is not None:
            tensors = [tensor.chunk(self.share[1])[self.share[0]] for tensor in tensors]
            if tensors[0].ndim > len(shape):  # a part is one entry
                tensors = [tensor.squeeze(0) for tensor in tensors]
        if self.folded:
            tensors = [tensor.flatten(-2) for tensor in tensors]
        if self.add:
            tensors = [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) + self.add for tensor in tensors]
        if self.transpose:
            tensors = [tensor.transpose(0, 1) for tensor in tensors]
        joined = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
        return joined if self.rows is None else joined[self.rows]

    def back(self, target: torch.Tensor) -> dict[str, torch.Tensor]:
        """The sources from the target."""
        if self.folded or self.add:
            raise NotImplementedError(f"{self.target}: a fold has forgotten its axes, and a sum was rounded")
        if self.rows is not None:
            target = target[self.rows.argsort()]
        parts = target.split(self.sizes) if self.sizes else [target]
        return {
            name: tensor.transpose(0, 1) if self.transpose else tensor for name, tensor in zip(self.sources, parts, strict=True)
        }


def rename(source: str, target: str, **options) -> Rule:
    return Rule(target, (source,), **options)


def both(source: str, target: str, has_bias: bool = True, **options) -> list[Rule]:
    """A weight and, where the target has one, its bias."""
    parts = ("weight", "bias") if has_bias else ("weight",)
    return [rename(f"{source}.{part}", f"{target}.{part}", **options) for part in parts]


def fill(target: str, constant: float) -> Rule:
    return Rule(target, constant=constant)


def for_each(count: int, rules: Iterable[Rule]) -> list[Rule]:
    """The rules once for each i below `count`, which stands for {i} in their names."""
    rules = list(rules)
    return [
        replace(rule, target=rule.target.replace("{i}", str(i)), sources=tuple(s.replace("{i}", str(i)) for s in rule.sources))
        for i in range(count)
        for rule in rules
    ]


def rows_by_kind(num_groups: int, queries: int, head_dim: int) -> torch.Tensor:
    """Order that turns a projection fused group by group (`queries` query heads, a key head, a value head; then the next
    group) into all queries, all keys, all values."""
    heads = torch.arange(num_groups * (queries + 2) * head_dim).view(num_groups, queries + 2, head_dim)
    return torch.cat([heads[:, :queries].flatten(), heads[:, queries].flatten(), heads[:, queries + 1].flatten()])


def rows_by_half(num_heads: int, head_dim: int, rotated: int) -> torch.Tensor:
    """Order that turns rotary pairs (2k, 2k + 1) of each head's first `rotated` dimensions into pairs (k, k + rotated / 2)."""
    within = torch.arange(head_dim)
    within[:rotated] = torch.cat([within[0:rotated:2], within[1:rotated:2]])
    return (torch.arange(num_heads)[:, None] * head_dim + within).flatten()


def listed(names: Iterable[str]) -> str:
    names = sorted(names)
    rest = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + rest


def check_names(where: str, there: Iterable[str], wanted: Iterable[str], drops: Iterable[str] = ()) -> None:
    """A file has to hold what is wanted, and besides only what is dropped on purpose."""
    there, wanted = set(there), set(wanted)
    if missing := wanted - there:
        raise InputError(f"{where}: lacks {listed(missing)}; are all files of the checkpoint there?")
    left = {name for name in there - wanted if not any(re.fullmatch(pattern, name) for pattern in drops)}
    if left:
        raise InputError(
            f"{where}: holds {listed(left)}, which have no place in the result: they may belong to a variant of the family "
            "that is not known here, so nothing was converted"
        )


def check_rules(where: str, rules: list[Rule], sources: Iterable[str], drops: Iterable[str], targets: Iterable[str]) -> None:
    """Every source tensor is used or dropped on purpose, every target filled, once. drops: patterns of whole names."""
    check_names(where, sources, {name for rule in rules for name in rule.sources}, drops)
    made, targets = [rule.target for rule in rules], set(targets)
    assert len(made) == len(set(made)), f"rules fill {listed(n for n in made if made.count(n) > 1)} twice"
    if unfilled := targets - set(made):
        raise InputError(f"{where}: its model needs {listed(unfilled)} too, such as an activation with weights, unknown here")
    assert set(made) == targets, f"rules fill {listed(set(made) - targets)}, which the model has not"


def apply_forth(
    where: str, rules: list[Rule], read: Callable[[str], torch.Tensor], shapes: Mapping[str, torch.Size]
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of each target; of the sources only those of one rule are in memory at a time."""
    for rule in rules:
        tensors = [read(name) for name in rule.sources]
        check_precision(where, rule.sources, tensors)
        sizes = [len(tensor) if tensor.ndim else 0 for tensor in tensors]
        fits = not rule.sizes or sizes == list(rule.sizes)
        fits = fits and (rule.rows is None or sum(sizes) == len(rule.rows))
        try:
            tensor = rule.forth(tensors, shapes[rule.target]).contiguous() if fits else None
        except (RuntimeError, IndexError, TypeError):  # what torch raises for shapes that do not go together
            tensor = None
        if tensor is None or tensor.shape != shapes[rule.target]:
            found = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in zip(rule.sources, tensors, strict=True))
            raise InputError(
                f"{where}: the shapes of {found} do not fit its config, which asks for {list(shapes[rule.target])} in all"
            )
        yield rule.target, tensor


def check_precision(where: str, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
    """Integers, and floating-point numbers of 8 bits, mean something only with scales that stand elsewhere."""
    wrong = [
        name for name, tensor in zip(names, tensors, strict=True) if not tensor.is_floating_point() or tensor.dtype.itemsize < 2
    ]
    if wrong:
        raise InputError(f"{where}: {listed(wrong)} hold quantised weights, which do not convert; take the full ones")


def apply_back(where: str, rules: list[Rule], read: Callable[[str], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of each source. Where several targets were made from one source they must be equal, and constants
    still be constant: otherwise something would be lost."""
    target_of: dict[str, str] = {}
    shares: dict[str, dict[int, str]] = {}  # source -> number of its part -> target
    for rule in rules:
        if rule.share is not None:
            shares.setdefault(rule.sources[0], {})[rule.share[0]] = rule.target
    for rule in rules:
        if rule.share is not None:
            (name,) = rule.sources
            if name not in target_of:
                target_of[name] = rule.target
                yield name, torch.cat([read(target) for _, target in sorted(shares[name].items())])
            continue
        tensor = read(rule.target)
        if rule.constant is not None:
            if not bool((tensor == rule.constant).all()):
                raise InputError(
                    f"{where}: {rule.target} is not {rule.constant:g} everywhere (any more), and the target format has no "
                    "place for it; the model cannot be converted back without loss"
                )
            continue
        for name, part in rule.back(tensor).items():
            if name not in target_of:
                target_of[name] = rule.target
                yield name, part.contiguous()
            elif not torch.equal(read(target_of[name]), tensor):
                raise InputError(
                    f"{where}: {rule.target} and {target_of[name]} differ (they are one tensor, {name}, in the target "
                    "format); the model cannot be converted back without loss"
                )
