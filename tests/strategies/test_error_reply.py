"""Error replies in one short line; dead workers are told from clients that raise."""

import pytest
from flwr.app import Error, Message, RecordDict

from strategies.error_reply import LONGEST, WORKER_DIED, error_line, worker_died
from tests.in_process_grid import set_task_identity

# As Flower 1.42 and Ray 2.55 write them.
DEAD = (
    "<class 'ray.exceptions.ActorDiedError'>:<'The actor died unexpectedly before finishing this task.\n"
    "\tclass_name: ClientAppActor\n\tactor_id: 0a\n\tpid: 7\nThe actor is dead because its worker process has died. "
    "Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error code 2.'>"
)
RAISED = (
    "<class 'ray.exceptions.RayTaskError(ClientAppException)'>:<'\x1b[36mray::ClientAppActor.run()\x1b[39m (pid=7)\n"
    + '  File "/x/ray_actor.py", line 1, in run\n' * 9
    + "flwr.clientapp.client_app.ClientAppException: \x1b[31mboom\x1b[0m"
)


def reply(reason: str | None, code: int = 0) -> Message:
    set_task_identity()
    return Message(Error(code, reason), reply_to=Message(RecordDict(), 7, "train"))


@pytest.mark.parametrize(
    ("reason", "line", "died"),
    [
        (DEAD, WORKER_DIED, True),
        (DEAD.replace("ActorDied", "OutOfMemory"), WORKER_DIED, True),
        (RAISED, "flwr.clientapp.client_app.ClientAppException: boom", False),
        (
            "<class 'ValueError'>:<'see ray.exceptions.ActorDiedError'>",
            "<class 'ValueError'>:<'see ray.exceptions.ActorDiedError'>",
            False,
        ),
        ("cannot import\nclient_app", "cannot import client_app", False),
        ("", "error code 4", False),
        (None, "error code 4", False),
        ("x" * 10_000, "x" * LONGEST + " ...", False),
    ],
)
def test_error_replies_are_one_short_line(reason: str | None, line: str, died: bool) -> None:
    assert error_line(reply(reason, 4)) == line
    assert worker_died(reply(reason, 4)) == died
