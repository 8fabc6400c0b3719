"""torch.distributed.checkpoint syncs its commit marker before the marker has been written.

`.metadata` is the commit marker of a DCP folder. It is pickled into a buffered file, whose
descriptor is synced while the bytes are still in the buffer: they reach the kernel only when the
file is closed, and the disk at some later time. A power failure in between leaves an empty marker
under the name of a complete checkpoint.

    $ python examples/comparisons/marker_not_durable.py
    DCP: __0_0.distcp: 5545 of 5545 bytes were there to be synced
    DCP: .metadata.tmp: 0 of 845 bytes were there to be synced
    ours: 00000-of-00001.safetensors: 4128 of 4128 bytes were there to be synced
    ours: .manifest-9dff1042.json: 689 of 689 bytes were there to be synced
    ours: .tmp-LATEST-56bd51fd: 21 of 21 bytes were there to be synced
"""

import os
import tempfile

import torch
from torch.distributed.checkpoint.state_dict_saver import save

import checkpoints

fsync = os.fsync


def watch(call):
    """File name, bytes in the kernel when it was synced, bytes in the end; for each file."""
    seen = []

    def watched(descriptor):
        descriptor = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        os.dup(descriptor)  # prevents the reuse of the inode number
        seen.append((descriptor, name, os.fstat(descriptor)))
        return fsync(descriptor)

    os.fsync = watched
    try:
        call()
    finally:
        os.fsync = fsync
    return [
        (os.path.basename(name), status.st_size, status.st_ino)
        for _, name, status in seen
        if not os.path.isdir(name)
    ]


def sizes(folder):
    found = {}
    for base, _, files in os.walk(folder):
        for file in files:
            status = os.stat(os.path.join(base, file))
            found[status.st_ino] = status.st_size
    return found


state = {"weight": torch.randn(1000)}
with tempfile.TemporaryDirectory() as folder:
    for subject, call in (
        ("DCP", lambda: save(state, checkpoint_id=f"{folder}/dcp", no_dist=True)),
        ("ours", lambda: checkpoints.save(f"{folder}/ours", state, step=1, nonce="aa")),
    ):
        synced = watch(call)
        final = sizes(folder)
        for name, size, inode in synced:
            if inode in final:
                print(f"{subject}: {name}: {size} of {final[inode]} bytes were there to be synced")
