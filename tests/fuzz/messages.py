"""Mutations of any protobuf message, by what its schema says: they know nothing of ONNX."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as Field

from tests.fuzz import hostile

BOUNDS = {
    Field.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    Field.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    Field.CPPTYPE_UINT32: (0, 2**32 - 1),
    Field.CPPTYPE_UINT64: (0, 2**64 - 1),
}

LARGEST = 65_536
"""Entries of a field above which it is a tensor's data, and bytes above which they are."""


def places(message: Any) -> Iterator[tuple[Any, Any]]:
    """Every message inside a message, itself too, with each of its fields that is set."""
    for field, value in message.ListFields():
        yield message, field
        if field.cpp_type == Field.CPPTYPE_MESSAGE:
            for each in value if field.is_repeated else [value]:
                yield from places(each)


def absent(message: Any) -> Iterator[tuple[Any, Any]]:
    """Every message inside a message with each of its fields that is not set."""
    found = {id(message): message}
    for holder, field in places(message):
        if field.cpp_type == Field.CPPTYPE_MESSAGE:
            value = getattr(holder, field.name)
            found.update((id(each), each) for each in (value if field.is_repeated else [value]))
    for each in found.values():
        present = {field.name for field, _ in each.ListFields()}
        yield from ((each, field) for field in each.DESCRIPTOR.fields if field.name not in present)


def scalar(rng: Random, field: Any, donor: Any) -> Any:
    """A value for a field that is no message: at an edge, or the same field's of another message."""
    if donor is not None and rng.random() < 0.3:
        return donor
    kind = field.cpp_type
    if kind == Field.CPPTYPE_STRING:
        if field.type == Field.TYPE_BYTES:
            return rng.choice(
                (b"", b"\x00", rng.randbytes(rng.randrange(64)), hostile.string(rng).encode("utf-8", "replace"))
            )
        return hostile.string(rng)
    if kind in (Field.CPPTYPE_FLOAT, Field.CPPTYPE_DOUBLE):
        return rng.choice(hostile.FLOATS)
    if kind == Field.CPPTYPE_ENUM:
        return rng.choice(field.enum_type.values).number
    if kind == Field.CPPTYPE_BOOL:
        return rng.random() < 0.5
    return hostile.integer(rng, *BOUNDS[kind])


def mutate(message: Any, rng: Random) -> str:
    """Change one field somewhere in a message; says which and how."""
    if rng.random() < 0.15:
        message, field = rng.choice(list(absent(message)))
        return _set(message, field, rng)
    found = list(places(message))
    # fields of few kinds are as likely as those of many: else all that changes is names
    by_name: dict[str, list[tuple[Any, Any]]] = {}
    for holder, field in found:
        by_name.setdefault(field.full_name, []).append((holder, field))
    holder, field = rng.choice(by_name[rng.choice(sorted(by_name))])
    donors = [getattr(other, field.name) for other, _ in by_name[field.full_name]]
    if field.is_repeated:
        return _repeated(holder, field, rng, donors)
    if rng.random() < 0.2:
        holder.ClearField(field.name)
        return f"clear {field.full_name}"
    if field.cpp_type == Field.CPPTYPE_MESSAGE:
        getattr(holder, field.name).CopyFrom(_copied(rng.choice(donors)))
        return f"graft {field.full_name}"
    value = scalar(rng, field, rng.choice(donors))
    setattr(holder, field.name, value)
    return f"set {field.full_name} to {_short(value)}"


def _set(holder: Any, field: Any, rng: Random) -> str:
    if field.cpp_type == Field.CPPTYPE_MESSAGE:
        value = getattr(holder, field.name)
        value.add() if field.is_repeated else value.SetInParent()
        return f"add an empty {field.full_name}"
    value = scalar(rng, field, None)
    if field.is_repeated:
        getattr(holder, field.name).append(value)
    else:
        setattr(holder, field.name, value)
    return f"add {field.full_name}: {_short(value)}"


def _repeated(holder: Any, field: Any, rng: Random, donors: list[Any]) -> str:
    values = getattr(holder, field.name)
    where = rng.randrange(len(values))
    is_message = field.cpp_type == Field.CPPTYPE_MESSAGE
    how = rng.choice(
        ("delete", "repeat", "swap", "graft", "many", "cut")
        if is_message
        else ("delete", "repeat", "swap", "set", "set", "set")
    )
    if how == "delete":
        del values[where]
    elif how == "repeat":
        values.add().CopyFrom(_copied(values[where])) if is_message else values.append(values[where])
    elif how == "swap":
        other = rng.randrange(len(values))
        if is_message:
            one = _copied(values[where])
            values[where].CopyFrom(_copied(values[other]))
            values[other].CopyFrom(one)
        else:
            values[where], values[other] = values[other], values[where]
    elif how == "graft":
        values[where].CopyFrom(_copied(rng.choice(rng.choice(donors))))
    elif how == "many":
        one = _copied(values[where])
        for _ in range(rng.choice((3, 20, 300)) if one.ByteSize() < LARGEST else 1):
            values.add().CopyFrom(one)
    elif how == "cut":
        del values[where:]
    else:
        value = scalar(rng, field, rng.choice(rng.choice(donors)))
        values[where] = value
        return f"set {field.full_name}[{where}] to {_short(value)}"
    return f"{how} {field.full_name}[{where}]"


def _copied(message: Any) -> Any:
    copy = type(message)()
    copy.CopyFrom(message)
    return copy


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:50]}... ({len(text)})"
