"""
Write the lists of YAML keys into their pages: `python -m tools.configuration
docs/configuration.md …`.

A page marks each place by `<!-- keys of core.config.run.RunConfig -->` and `<!-- end of keys -->`.
The mark names a frozen class, the refusals, or the file of other programs' keys. A class becomes a
list for each of its sections, made from the types, defaults and docstrings of its fields. Refusals
become one list, and the keys of other programs one table.

The files `trainer_keys.json` and `grpo_keys.json` are not pages. They become tables of the keys
that the installed ms-swift and TRL take.
"""

import argparse
import ast
import dataclasses
import inspect
import json
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from importlib import import_module
from pathlib import Path
from typing import Any

import attrs
import cattrs

from packplan.adapters.config.run import known_keys
from packplan.adapters.config.trainer_keys import (
    FOREIGN_KEYS_FILE,
    GRPO_KEYS_FILE,
    LIBRARIES,
    SFT_KEYS_FILE,
    TrainerKey,
)
from packplan.adapters.versions import installed_version
from packplan.core.config.keys import key_facts
from packplan.core.config.run import PathText, RunConfig, TrainingConfig
from packplan.core.config.tuners import UNSET

_MARKED = re.compile(r"(<!-- keys of ([\w.]+) -->).*?(<!-- end of keys -->)", re.DOTALL)

_NAMES = re.compile(r"`(core(?:\.\w+)*\.[A-Z_]+)`")

_TYPES = {
    str: "text",
    PathText: "path",
    int: "integer",
    float: "number",
    Decimal: "number",
    bool: "bool",
}

_TABLE_TYPES = {"str": "text", "list": "text, or a list", "int": "integer", "float": "number", "bool": "bool"}
"""Name of a type in a table of keys -> its name on a page."""

HOSTS = {
    "sft": "sft",
    "plugin": "plugin",
    "rlhf": "unpacked",
    "trainer": "use_plan",
    "balance": "balance",
}
"""Host of a refusal -> its name on a page."""

MORE = {
    "custom.train_jsonl": "records.md",
    "model.model": "use-it-in/swift.md#keys-of-a-yaml",
    "model.quant_method": "use-it-in/swift.md#tuners",
    "training.tuner_type": "use-it-in/swift.md#tuners",
    "custom.source_names": "see-a-plan.md#show",
    "custom.columns": "records.md#shapes",
    "custom.on_bad_record": "records.md#bad-records",
    "custom.records_cache": "records.md#files",
    "custom.fusion_config": "mixing.md",
    "custom.fusion_schedule": "mixing.md#a-mix",
    "custom.max_line_bytes": "records.md",
    "custom.max_image_pixels": "records.md#images",
    "custom.literal_image_tags": "records.md#images",
    "custom.trainer_variant": "mixing.md#streams",
    "training.packing": "training.md#packed-or-padded",
    "training.packing_algorithm": "planner.md#algorithms",
    "training.packing_max_images": "planner.md#images-in-a-pack",
    "training.packing_epochs": "planner.md#other-packs-each-epoch",
    "training.packing_balance": "see-a-plan.md#work",
    "training.packing_mode": "mixing.md#streams",
    "training.packing_wait_timeout_s": "how-it-works.md#ranks",
    "training.eval_packing": "training.md#evaluation",
    "training.loss_reduction": "training.md#the-loss-of-a-step",
    "training.resume_from_checkpoint": "training.md#resume",
}
"""Key -> page with more about the key, relative to the written page."""


TUNER_KEYS = {
    "lora_rank": "Rank of LoRA adapters.",
    "lora_alpha": "Outputs of LoRA adapters are multiplied by this value over their rank.",
    "lora_dropout": "Dropout of the inputs of LoRA adapters.",
    "target_modules": "Modules that get adapters: names, `all-linear` or `all-embedding`.",
    "target_regex": "Regular expression for the names of modules that get adapters, in place of `target_modules`.",
    "target_parameters": "Parameters that get adapters of their own, such as experts that are not modules.",
    "modules_to_save": "Modules that are trained in full beside the adapters: names, `all-embedding` or `all-norm`.",
    "use_rslora": "Divide `lora_alpha` by the square root of the rank instead of the rank (rsLoRA).",
    "use_dora": "Also train the magnitude of each adapted weight (DoRA).",
    "init_weights": "Initial LoRA adapters: `gaussian`, `false` (all random), or derived from the model's weights by "
    "`pissa`, `pissa_niter_16` or `olora`. If unset, new adapters leave outputs unchanged.",
    "lorap_lr_ratio": "Learning rate of an adapter's second matrix, as a multiple of its first matrix's (LoRA+).",
    "freeze_aligner": "Freeze the projector of the vision tower.",
    "freeze_parameters": "Freeze weights with one of these name prefixes, if `tuner_type` is `full`.",
    "freeze_parameters_regex": "Freeze weights whose names match this regular expression.",
    "freeze_parameters_ratio": "Freeze this share of the weights, beginning with the first layers.",
    "trainable_parameters": "Train weights with one of these name prefixes, even if other keys freeze them.",
    "trainable_parameters_regex": "Train weights whose names match this regular expression, even if another key "
    "freezes them.",
}
"""Key of ms-swift's tuners under `training.` -> its meaning."""


def rewrite_lists(page: str) -> str:
    """Return a page whose marked places contain the current lists."""
    return _MARKED.sub(lambda found: "\n".join([found[1], *_part_lines(found[2]), found[3]]), page)


def key_table_text(keys: Mapping[str, TrainerKey], path: Path, others: Sequence[str] = ()) -> str:
    """
    Return the JSON text of a table of the installed libraries' keys, with one line for each key.

    Args:
        keys: Keys by name.
        path: File of the table.
        others: Names of the library's further keys, which no section takes.
    """
    plain = TrainerKey(())
    lines = [
        f"    {json.dumps(name)}: "
        f"{json.dumps(attrs.asdict(key, filter=lambda part, value: value != getattr(plain, part.name)))}"
        for name, key in sorted(keys.items())
    ]
    versions = json.dumps({name: installed_version(name) for name in LIBRARIES[path]})
    unread = f'  "others": {json.dumps([*others])},\n' if others else ""
    return f'{{\n  "versions": {versions},\n{unread}  "keys": {{\n' + ",\n".join(lines) + "\n  }\n}\n"


def trainer_table() -> str:
    """Return the table of the keys that the training arguments of the installed ms-swift take."""
    from swift.arguments import SftArguments

    from packplan.adapters.trainer.arguments import installed_keys

    keys = installed_keys()
    taken = {*keys, *(path.rpartition(".")[2] for path in known_keys(RunConfig))}
    others = sorted({field.name for field in dataclasses.fields(SftArguments)} - taken)
    return key_table_text(keys, SFT_KEYS_FILE, others)


def grpo_table() -> str:
    """Return the table of the keys that the installed TRL takes for GRPO."""
    from packplan.app.opening.grpo import installed_keys

    return key_table_text(installed_keys(), GRPO_KEYS_FILE)


def _part_lines(name: str) -> Iterator[str]:
    described = _import_name(name)
    if described == FOREIGN_KEYS_FILE:
        yield from _foreign_lines()
    elif isinstance(described, tuple):
        same: dict[tuple[str, str], list[str]] = {}
        for one in described:
            hosts = ", ".join(HOSTS[host] for host in one.hosts)
            same.setdefault((hosts, str(one).removesuffix(": remove it")), []).append(f"`{one.setting}`")
        yield from _list_lines([(", ".join(names), hosts, why) for (hosts, why), names in same.items()])
    else:
        yield from _section_lines(described, "")


def _foreign_lines() -> Iterator[str]:
    """Yield the table of other programs' keys, with a row for each key that replaces them."""
    programs = ("TRL", "axolotl", "LLaMA-Factory", "ms-swift")
    read = json.loads(FOREIGN_KEYS_FILE.read_text(encoding="utf-8"))
    rows = [row for row in read if row["here"] and row.keys() & {*programs}]
    yield from ("", f"| here | {' | '.join(programs)} | |", "|---" * (len(programs) + 2) + "|")
    for row in rows:
        theirs = (", ".join(f"`{name}`" for name in row.get(program, "").split()) for program in programs)
        yield re.sub(" +", " ", f"| `{row['here']}` | {' | '.join(theirs)} | {row.get('about', '')} |")
    yield ""


def _import_name(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute)


def _section_lines(kind: type, path: str) -> Iterator[str]:
    """Yield the lists of a class: first its own keys, then the keys of each section below it."""
    docstrings = _field_docstrings(kind)
    rows: list[tuple[str, str, str]] = []
    below = []
    for field in attrs.fields(attrs.resolve_types(kind)):
        plain = _type_without_none(field.type)
        if key_facts(field).set_by_command:
            continue
        if attrs.has(plain):
            below.append((plain, f"{path}{field.name}."))
        elif typing.get_origin(plain) is Mapping:
            if kind is TrainingConfig:
                rows += _tuner_rows()
            rows.append(("any other", "", docstrings[field.name]))
        else:
            rows.append(
                (
                    f"`{field.name}`",
                    "; ".join(filter(None, (_type_text(plain), _default_text(field)))),
                    _linked_meaning(f"{path}{field.name}", docstrings[field.name]),
                )
            )
            if item := _item_class(plain):
                below.append((item, f"{path}{field.name}[]."))
    if path:
        about = re.sub(r"^`[\w.]+`: ", "", inspect.getdoc(kind) or "")
        yield from (f"## `{path}`", "", about[:1].upper() + about[1:])
    if rows:
        yield from _list_lines(rows)
    for section, section_path in below:
        yield from _section_lines(section, section_path)


def _tuner_rows() -> Iterator[tuple[str, str, str]]:
    """Yield the name, the type with the default, and the meaning of each of `TUNER_KEYS`."""
    table = cattrs.structure(json.loads(SFT_KEYS_FILE.read_text(encoding="utf-8"))["keys"], dict[str, TrainerKey])
    for name, meaning in TUNER_KEYS.items():
        default = _value_text(value) if (value := UNSET.get(name)) not in (None, []) else ""
        (kind,) = {*table[name].types} - {"null"}
        yield f"`{name}`", "; ".join(filter(None, (_TABLE_TYPES[kind], default))), meaning


def _field_docstrings(kind: type) -> dict[str, str]:
    """Return the docstring below each field of a class, on one line."""
    (tree,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(tree, ast.ClassDef)  # noqa: S101  # it is the source of a class
    found = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            found[field.target.id] = " ".join(ast.literal_eval(below.value).split())
    return found


def _type_without_none(kind: Any) -> Any:
    if typing.get_origin(kind) not in {types.UnionType, typing.Union}:
        return kind
    inner, *words = (part for part in typing.get_args(kind) if part is not type(None))
    return kind if words else inner


def _item_class(kind: Any) -> Any:
    """Return the class of a list's items, or None if the items have no keys."""
    item: Any = next(iter(typing.get_args(kind)), None)
    return item if attrs.has(item) else None


def _type_text(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in typing.get_args(kind))
    if typing.get_origin(kind) in {types.UnionType, typing.Union}:
        return " or ".join(map(_type_text, typing.get_args(kind)))
    if typing.get_origin(kind) is tuple:
        one = _TYPES.get(typing.get_args(kind)[0])
        return f"{one}, or a list" if one else "list"
    return "mapping" if typing.get_origin(kind) is dict else _TYPES[kind]


def _default_text(field: Any) -> str:
    if field.default is attrs.NOTHING:
        return "needed"
    if field.default in {None, ()} or isinstance(field.default, attrs.Factory):  # type: ignore[arg-type]
        return ""
    return _value_text(field.default)


def _value_text(value: Any) -> str:
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{', '.join(value) if isinstance(value, (tuple, list)) else value}`"


def _linked_meaning(path: str, docstring: str) -> str:
    meaning = _NAMES.sub(lambda found: ", ".join(f"`{name}`" for name in _import_name(found[1])), docstring)
    return f"{meaning} [More]({MORE[path]})" if path in MORE else meaning


def _list_lines(rows: Sequence[tuple[str, str, str]]) -> Iterator[str]:
    """Yield a list of names, each with its kind and its meaning."""
    yield ""
    for name, kind, meaning in rows:
        yield f"- {name}{f' ({kind})' if kind else ''}: {meaning}"
    yield ""


def main(arguments: list[str] | None = None) -> None:
    """Rewrite the named pages and tables."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.configuration", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pages", nargs="+", type=Path, metavar="page.md", help="page or .json table to rewrite")
    for page in parser.parse_args(arguments).pages:
        tables = {"trainer_keys.json": trainer_table, "grpo_keys.json": grpo_table}
        write = tables.get(page.name)
        text = rewrite_lists(page.read_text(encoding="utf-8")) if write is None else write()
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
