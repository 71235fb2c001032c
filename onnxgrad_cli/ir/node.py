"""`Node`: a node of a graph, stored in Python lists and strings.

A build walks over its nodes dozens of times. Each access to a protobuf field creates new strings, which takes longer
than the work of the walk. A `Node` stores its strings, and equal names are mostly one object. A node that was read from
a file keeps its protobuf message. The message is updated when the node is written, so unknown fields are preserved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableSequence, Sequence
from copy import deepcopy
from typing import Any

import onnx
from onnx import AttributeProto, NodeProto, StringStringEntryProto

ROLE, FORWARD = "onnxgrad.role", "onnxgrad.forward"
"""Keys in the metadata of a node: the part of the training model, and the name of the forward node it belongs to.

`FORWARD` names the forward node that a backward node differentiates, or the node of the file that a node replaces.
"""


class Node:
    """A node. Its fields are named as in NodeProto, so functions that only read nodes accept both.

    Attributes:
        op_type, domain: the operator.
        name: the name of the node.
        input, output: names of values; "" is an omitted value.
        attribute: the attributes. No other node shares them, so they may be changed in place.
        metadata: key -> text about the node. Nodes share this map, so it is replaced and never changed in place.
    """

    __slots__ = ("_message", "attribute", "domain", "input", "metadata", "name", "op_type", "output")

    def __init__(
        self,
        op_type: str,
        input: Iterable[str],
        output: Iterable[str],
        name: str,
        domain: str = "",
        attribute: Iterable[AttributeProto] = (),
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.op_type = op_type
        self.domain = domain
        self.name = name
        self.input = list(input)
        self.output = list(output)
        self.attribute: MutableSequence[AttributeProto] = list(map(_copied, attribute)) if attribute else []
        self.metadata: Mapping[str, str] = _NOTHING if metadata is None else metadata
        self._message: NodeProto | None = None

    @classmethod
    def read(cls, message: NodeProto) -> Node:
        """Return a node for a message. The node owns the message from now on, and changes its attributes in place."""
        node = cls.__new__(cls)
        node.op_type = message.op_type
        node.domain = message.domain
        node.name = message.name
        node.input = message.input[:]
        node.output = message.output[:]
        node.attribute = message.attribute
        node.metadata = _told(message)
        node._message = message
        return node

    @property
    def overload(self) -> str:
        """The overload of the called function. It distinguishes functions with the same name."""
        return "" if self._message is None else str(self._message.overload)

    def message(self) -> NodeProto:
        """Return the node as a message: the one that it was read from, updated, or a new one."""
        message = self._message
        if message is None:
            return NodeProto(
                op_type=self.op_type, input=self.input, output=self.output, name=self.name, domain=self.domain,
                attribute=self.attribute, metadata_props=_entries(self.metadata),
            )  # fmt: skip
        for field in ("op_type", "domain", "name"):
            if getattr(message, field) != (text := getattr(self, field)):
                setattr(message, field, text)
                if not text:
                    message.ClearField(field)
        if message.input[:] != self.input:
            message.input[:] = self.input
        if message.output[:] != self.output:
            message.output[:] = self.output
        if _told(message) != self.metadata:
            refill(message.metadata_props, _entries(self.metadata))
        return message

    def __repr__(self) -> str:
        return f"{', '.join(self.output)} = {self.op_type}({', '.join(self.input)})"


def make_node(op_type: str, inputs: Sequence[str], outputs: Sequence[str], *args: Any, **attributes: Any) -> Node:
    """Return a new node; the arguments are those of `onnx.helper.make_node`."""
    return Node.read(onnx.helper.make_node(op_type, inputs, outputs, *args, **attributes))


def copied(node: Node | NodeProto) -> Node:
    """Return a deep copy of a node."""
    return Node.read(deepcopy(as_message(node)))


def as_message(node: Node | NodeProto) -> NodeProto:
    """Return a node as a protobuf message, for functions of onnx."""
    return node.message() if isinstance(node, Node) else node


def messages(nodes: Iterable[Node | NodeProto]) -> list[NodeProto]:
    """Return nodes as protobuf messages, for functions of onnx."""
    return list(map(as_message, nodes))


def write(nodes: Sequence[Node | NodeProto], field: Any) -> None:
    """Replace the content of a repeated protobuf field by these nodes."""
    if len(nodes) == len(field) and all(
        isinstance(node, Node) and node._message is message and node.message() is message
        for node, message in zip(nodes, field, strict=True)
    ):
        return
    del field[:]
    said: Mapping[str, str] = {}
    entries: list[StringStringEntryProto] = []
    for node in nodes:
        if not isinstance(node, Node) or node._message is not None:
            field.append(as_message(node))
            continue
        if node.metadata is not said:  # most nodes share their metadata with the node before
            said, entries = node.metadata, _entries(node.metadata)
        field.add(
            op_type=node.op_type, input=node.input, output=node.output, name=node.name, domain=node.domain,
            attribute=node.attribute, metadata_props=entries,
        )  # fmt: skip


def refill(field: Any, entries: Iterable[Any]) -> None:
    """Replace the entries of a repeated protobuf field. The new entries may be among the old ones."""
    entries = list(entries)
    del field[:]
    field.extend(entries)


def metadata(node: Node | NodeProto) -> Mapping[str, str]:
    """Return the metadata of a node, which may be a message."""
    return node.metadata if isinstance(node, Node) else _told(node)


def set_metadata(node: Node | NodeProto, metadata: Mapping[str, str]) -> None:
    """Replace the metadata of a node, given as a Node or a NodeProto."""
    if isinstance(node, Node):
        node.metadata = metadata
    else:
        refill(node.metadata_props, _entries(metadata))


def metadata_of(node: Node | NodeProto, key: str) -> str:
    """Return the text under a key in the metadata of a node, or "" if the key is missing."""
    return metadata(node).get(key, "")


def _told(message: NodeProto) -> Mapping[str, str]:
    props = message.metadata_props
    return {entry.key: entry.value for entry in props} if props else _NOTHING


_NOTHING: Mapping[str, str] = {}


def _copied(attribute: AttributeProto) -> AttributeProto:
    copy = AttributeProto()
    copy.CopyFrom(attribute)
    return copy


def _entries(metadata: Mapping[str, str]) -> list[StringStringEntryProto]:
    return [StringStringEntryProto(key=key, value=value) for key, value in metadata.items()]
