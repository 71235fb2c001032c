"""Write docs/reference/output.schema.json: a JSON Schema (2020-12) of the JSON that each command prints.

The schema of a result is generated from the dataclass that the command prints, so a new field is included.
"""

import dataclasses
import json
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from onnxgrad_cli.cli.terminal.document import STATUSES, VERSION
from onnxgrad_cli.errors import CODES, Refusal
from onnxgrad_cli.jobs.expand import Piece
from onnxgrad_cli.jobs.train import Trained
from onnxgrad_cli.report import Report
from onnxgrad_cli.training.inference import Evaluated
from onnxgrad_cli.verification.verdict import Proof

FILE = Path(__file__).parents[1] / "docs" / "reference" / "output.schema.json"

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}

TEXTS: Schema = {"type": "array", "items": TEXT}

OBJECTS: Schema = {"type": "array", "items": {"type": "object"}}

PLAIN: dict[object, Schema] = {
    str: TEXT,
    Path: TEXT,
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": ["number", "null"], "description": "null stands for infinity and NaN"},
    type(None): {"type": "null"},
}

MANY: Schema = {"type": "array", "items": {"$ref": "#/$defs/one of several models"}}


def schema() -> Schema:
    """Return the schema of the document that a command prints with --json."""
    defs: dict[str, Schema] = {}
    report, proof = _of(Report, defs), _of(Proof, defs)
    results = {
        "build": {"anyOf": [report, MANY]},
        "inspect": {"anyOf": [report, MANY]},
        "check": {"anyOf": [proof, MANY]},
        "train": _of(Trained, defs),
        "expand": {"type": "array", "items": _of(Piece, defs)},
        "view": {"type": "object", "required": ["title"]},
        "evaluate": _of(Evaluated, defs),
        "predict": _object(samples=PLAIN[int], outputs={"type": "object"}, files=TEXTS),
        "derive": _object(
            input={"type": "object"}, output={"type": "object"}, of=TEXT, files=TEXTS, proof={"type": "object"}
        ),
        "explain": _object(
            method=TEXT,
            what=TEXT,
            shape={"type": "array", "items": {"type": "integer"}},
            samples=OBJECTS,
            tokens={"type": ["array", "null"]},
            proof={"type": "object"},
            files=TEXTS,
        ),
        "attack": _object(
            method=TEXT,
            loss=TEXT,
            what=TEXT,
            samples={"type": "integer"},
            success={"type": ["number", "null"], "description": "null if there was no sample to attack"},
            accuracy={"type": "object"},
            distance={"type": "object"},
            vanishing={
                "type": "integer",
                "description": "number of samples on which the attack failed and whose gradient vanished at its start",
            },
            proof={"type": "object"},
            files=TEXTS,
        ),
        "export": _object(files=TEXTS),
        "pack": _object(files=TEXTS),
        "tune": _object(measured=OBJECTS, file=TEXT),
        "list": OBJECTS,
    }
    base = {
        "version": {
            "const": VERSION,
            "description": "version of this schema; increased when a key changes its meaning or is removed",
        },
        "command": {**TEXT, "description": "name of the command; empty if none was typed"},
        "status": {"enum": list(STATUSES.values()), "description": "the exit code as a word"},
        "exit_code": {"enum": list(STATUSES), "description": "exit code; the highest one for several models"},
        "result": {"description": "result of the command; null if it has none"},
        "error": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/error"}], "description": "null after success"},
        "warnings": {**TEXTS, "description": "warnings, notes and cautions that the command gave"},
    }
    defs["error"] = _object(
        code={"enum": list(CODES), "description": "the kind of failure"},
        message=TEXT,
        argument={"type": ["string", "null"], "description": "the option that does not fit, such as --lora"},
        hint={"type": ["string", "null"], "description": "how to fix the error; null if no fix is known"},
        details={**TEXTS, "description": "further lines of the message, such as one for each refused node"},
        refusals={"type": "array", "items": _of(Refusal, defs), "description": "nodes that can't be differentiated"},
    )
    of_several = {
        "model": {**TEXT, "description": "file of the model"},
        "verdict": {**TEXT, "description": "outcome for the model, in one line"},
        "seconds": {"type": "number", "description": "duration of the run for the model"},
        "files": {**TEXTS, "description": "the models that were written"},
    }
    whole = {**_object(**base), "allOf": [*_codes(), *_results(results)]}
    defs["one of several models"] = {**whole, **_object(**base, **of_several)}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://onnxgrad.github.io/onnxgrad/reference/output.schema.json",
        "title": "The JSON document that every command of onnxgrad prints with --json",
        **whole,
        "$defs": defs,
    }


def _codes() -> list[Schema]:
    """Return the conditions that each exit code has its status, and that failures have an error."""
    return [
        {
            "if": {"properties": {"exit_code": {"const": code}}},
            "then": {
                "properties": {
                    "status": {"const": word},
                    "error": {"type": "object"} if code else {"type": "null"},
                }
            },
        }
        for code, word in STATUSES.items()
    ]


def _results(results: dict[str, Schema]) -> list[Schema]:
    """Return the conditions that each command has its own kind of result."""
    return [
        {
            "if": {"properties": {"command": {"const": name}}},
            "then": {"properties": {"result": {"anyOf": [{"type": "null"}, result]}}},
        }
        for name, result in results.items()
    ]


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _of(kind: Any, defs: dict[str, Schema]) -> Schema:
    """Return the schema of a type. The schemas of dataclasses are added to `defs` by name."""
    origin, parts = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        assert isinstance(kind, type)
        if kind.__name__ not in defs:
            defs[kind.__name__] = {}
            hints = get_type_hints(kind)
            fields = {field.name: _of(hints[field.name], defs) for field in dataclasses.fields(kind)}
            about = (kind.__doc__ or "").splitlines()[0].replace("`", "")
            defs[kind.__name__] = {"description": about, **_object(**fields)}
        return {"$ref": f"#/$defs/{kind.__name__}"}
    if origin is Literal:
        return {"enum": list(parts)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_of(part, defs) for part in parts]}
    if origin is dict or kind is dict:
        return {"type": "object", **({"additionalProperties": _of(parts[1], defs)} if parts else {})}
    if origin in (list, tuple):
        return {"type": "array", "items": _items(parts, defs)}
    return PLAIN.get(kind, {})


def _items(parts: tuple[Any, ...], defs: dict[str, Schema]) -> Schema:
    kinds = [_of(part, defs) for part in parts if part is not Ellipsis]
    return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}


def files() -> dict[Path, str]:
    """Return the path of the schema, and its text."""
    return {FILE: json.dumps(schema(), indent=2) + "\n"}
