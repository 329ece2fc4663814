"""Worker processes that take turns at training: `pool` starts them, `remote_training` is what the executor sees.

`worker` is the process itself, `handover` a training that changes hands, `shared_memory` where its tensors lie.
"""
