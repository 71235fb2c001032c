"""`Node`: a node of a graph under work, as lists and words of Python's own.

A build walks over its nodes dozens of times. Each look into a protobuf makes its words anew, which takes longer than
what a walk does with them; here they are there already, and equal names are mostly one object. What is read from a
file keeps the message it was read from: that is brought up to date where the node is written, so that fields which
nobody here knows go out as they came in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableSequence, Sequence
from typing import Any

import onnx
from onnx import AttributeProto, NodeProto, StringStringEntryProto

ROLE, FORWARD = "onnxgrad.role", "onnxgrad.forward"
"""Keys in a node's metadata: the part of the training model it belongs to, and the forward node it differentiates."""


class Node:
    """A node; its fields are called as those of NodeProto are, and what only reads nodes need not tell them apart.

    Attributes:
        op_type, domain: the operator.
        name: of the node.
        input, output: names of values; "" is one that is left out.
        attribute: the attributes, which no other node shares: they are changed where they are.
        metadata: keys and words about the node; it is replaced, never changed, for nodes share it.
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
        """The node in a message, of which it becomes the owner: attributes are changed where they are."""
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
        """Which of several functions of one name a node calls."""
        return "" if self._message is None else str(self._message.overload)

    def message(self) -> NodeProto:
        """The node as a message: the one that it was read from, brought up to date, or a new one."""
        message = self._message
        if message is None:
            return NodeProto(
                op_type=self.op_type, input=self.input, output=self.output, name=self.name, domain=self.domain,
                attribute=self.attribute, metadata_props=_entries(self.metadata),
            )  # fmt: skip
        if message.op_type != self.op_type:
            message.op_type = self.op_type
        if message.domain != self.domain:
            message.domain = self.domain
            if not self.domain:
                message.ClearField("domain")
        if message.name != self.name:
            message.name = self.name
        if message.input[:] != self.input:
            message.input[:] = self.input
        if message.output[:] != self.output:
            message.output[:] = self.output
        if _told(message) != self.metadata:
            set_metadata(message, self.metadata)
        return message

    def __repr__(self) -> str:
        return f"{', '.join(self.output)} = {self.op_type}({', '.join(self.input)})"


def make_node(op_type: str, inputs: Sequence[str], outputs: Sequence[str], *args: Any, **attributes: Any) -> Node:
    """A node as `onnx.helper.make_node` makes it."""
    return Node.read(onnx.helper.make_node(op_type, inputs, outputs, *args, **attributes))


def copied(node: Node | NodeProto) -> Node:
    """A copy of a node, which shares nothing with it."""
    message = NodeProto()
    message.CopyFrom(as_message(node))
    return Node.read(message)


def as_message(node: Node | NodeProto) -> NodeProto:
    """A node as a message, for what takes no others."""
    return node.message() if isinstance(node, Node) else node


def messages(nodes: Iterable[Node | NodeProto]) -> list[NodeProto]:
    """Nodes as messages, for what takes no others."""
    return list(map(as_message, nodes))


def write(nodes: Sequence[Node | NodeProto], field: Any) -> None:
    """Let the field of a message that holds nodes hold these, and no others."""
    if len(nodes) == len(field) and all(map(_stands_in, nodes, field)):
        return
    del field[:]
    said: Mapping[str, str] = {}
    entries: list[StringStringEntryProto] = []
    for node in nodes:
        if not isinstance(node, Node) or node._message is not None:
            field.append(as_message(node))
            continue
        if node.metadata is not said:  # as many nodes say the same
            said, entries = node.metadata, _entries(node.metadata)
        field.add(
            op_type=node.op_type, input=node.input, output=node.output, name=node.name, domain=node.domain,
            attribute=node.attribute, metadata_props=entries,
        )  # fmt: skip


def _stands_in(node: Node | NodeProto, message: NodeProto) -> bool:
    """Whether a node is the one in a message, which is brought up to date then."""
    return isinstance(node, Node) and node._message is message and node.message() is message


def metadata(node: Node | NodeProto) -> Mapping[str, str]:
    """The metadata of a node, which may be a message."""
    return node.metadata if isinstance(node, Node) else _told(node)


def set_metadata(node: Node | NodeProto, metadata: Mapping[str, str]) -> None:
    """Give a node, which may be a message, other metadata."""
    if isinstance(node, Node):
        node.metadata = metadata
    else:
        del node.metadata_props[:]
        node.metadata_props.extend(_entries(metadata))


def metadata_of(node: Node | NodeProto, key: str) -> str:
    """What the metadata of a node say under a key; "" where they say nothing."""
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
