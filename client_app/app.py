"""The ClientApp: thin decorated handlers around `client_app.handlers`."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable

from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp

from client_app import handlers
from gpu_runtime.contracts import one_line

# Flower's code for "the ClientApp raised".
CLIENT_APP_RAISED = 2

app = ClientApp()
log = logging.getLogger("paceline.client")


def _answer(handler: Callable[[Message, Context], Message], message: Message, context: Context) -> Message:
    """Run a handler; whatever it raises reaches the server as one line, and the whole story stays in the log here."""
    try:
        return handler(message, context)
    except Exception as error:
        log.error("%s failed\n%s", message.metadata.message_type, traceback.format_exc())
        return Message(
            Error(code=CLIENT_APP_RAISED, reason=one_line(f"{type(error).__name__}: {error}")), reply_to=message
        )


@app.query("identity")
def identity(message: Message, context: Context) -> Message:
    """Who this node is: its partition and its name."""
    return _answer(handlers.identity, message, context)


@app.query("profile")
def profile(message: Message, context: Context) -> Message:
    """What this node holds and, when asked to measure, what training costs here."""
    return _answer(handlers.profile, message, context)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train this node's tasks by the plan in the message."""
    return _answer(handlers.train, message, context)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate the model of the message on this node's own examples."""
    return _answer(handlers.evaluate, message, context)
