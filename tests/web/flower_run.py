"""A round of Flower on three clients of flower_client.py, without its network: leaves the weights in flower.npz."""

from pathlib import Path

import numpy as np
from flower_client import app
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity

from sample_models.federated.client import Client

# its runtime sets these, and without them no message is made
TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1

client = Client(Path("digits.json"))
start = client.arrays(Path("digits.bin").read_bytes())[1]
arrays = ArrayRecord({name: Array(start[name]) for name in client.shared})
replies = []
for number in range(3):
    content = RecordDict({"arrays": arrays, "config": ConfigRecord({"server-round": 1})})
    context = Context(1, number + 1, {"samples": f"{number}.npz"}, RecordDict(), {})
    replies.append(app(Message(content, dst_node_id=number + 1, message_type="train"), context))
found, metrics = FedAvg().aggregate_train(1, replies)
np.savez("flower.npz", **{name: array.numpy() for name, array in found.items()})
