"""What gcloud says, and what that means: the one table of it. What is not in it is passing.

Whoever asks again waits longer each time, and not for ever (patience.py). So a word that the table does not
know costs time, and nothing else.
"""

import enum
import json
import re
from typing import Any, NamedTuple


class Means(enum.Enum):
    """Of a call that failed."""

    GONE = "there is no such slice"
    TAKEN = "there is one of this name already"
    ROOM = "the zone has none left, and may have one later"
    QUOTA = "the project may have no more of them"
    FATAL = "somebody must change something: the login, a right, the zone, what is asked for"
    PASSING = "the same call may succeed in a moment"


# The first that fits the text, however it is spelt.
_WORDS = (
    (Means.FATAL, r"active account|invalid_grant|reauthenticat|UNAUTHENTICATED"),
    (
        Means.FATAL,
        r"PERMISSION_DENIED|does not have permission|access is unauthorized|SERVICE_DISABLED|has not been used in",
    ),
    (Means.FATAL, r"(location|zone|project|network|subnetwork) \S+ (is |was )?not found|unknown zone"),
    (Means.FATAL, r"INVALID_ARGUMENT|invalid choice|invalid value|unrecognized argument|argument --\S+:"),
    (Means.PASSING, r"quota metric|rate limit|per minute|problem refreshing"),
    (Means.QUOTA, r"quota"),
    (Means.ROOM, r"capacity|not enough resources|stockout|RESOURCE_EXHAUSTED"),
    (Means.TAKEN, r"ALREADY_EXISTS|already exists"),
    (Means.GONE, r"\bNOT_FOUND\b|resource \S+ was not found|HttpError 404"),
)


def means(text: str) -> Means:
    """Of all that a call said which failed."""
    return next((kind for kind, words in _WORDS if re.search(words, text, re.I)), Means.PASSING)


class State(enum.Enum):
    """Of a slice, as far as it matters here."""

    GONE = "gone"  # there is no such slice
    WAITING = "waiting"  # it is queued, or being made or deleted
    MOVING = "moving"  # something is done to it, after which it may be ready, with what ran on it or without
    READY = "ready"
    BAD = "bad"  # preempted or stopped: it must be deleted, which also gives its quota back
    FAILED = "failed"  # what was asked for was not had; it must be deleted too


# Of a TPU VM. All others are of one that moves: STARTING, RESTARTING, REIMAGING, REPAIRING, STOPPING, UNKNOWN and whatever comes.
_NODE = {
    "READY": State.READY,
    **dict.fromkeys(("CREATING", "DELETING"), State.WAITING),
    **dict.fromkeys(("PREEMPTED", "TERMINATED", "STOPPED", "HIDING", "HIDDEN"), State.BAD),
}
# Of a queued resource without a VM. All others wait.
_REQUEST = {"FAILED": State.FAILED, "SUSPENDED": State.BAD}


class Seen(NamedTuple):
    """What is known of a slice."""

    state: State
    said: str  # gcloud's own word for it
    addresses: list[str]  # of its workers
    labels: dict[str, str]


def read(output: bytes) -> dict[str, Any]:
    """What a call printed as JSON. Raises ValueError where it is cut off, or no object."""
    try:
        found = json.loads(output)
    except RecursionError as error:
        raise ValueError("too deep") from error
    if not isinstance(found, dict):
        raise ValueError("no object")
    return found


def node(said: dict[str, Any]) -> Seen:
    """Of a TPU VM. Raises ValueError where the answer has another form than it should."""
    state = _text(said.get("state"))
    ends = said.get("networkEndpoints") or []
    labels = said.get("labels") or {}
    if not isinstance(ends, list) or not all(isinstance(end, dict) for end in ends) or not isinstance(labels, dict):
        raise ValueError("its parts are not what they should be")
    return Seen(_NODE.get(state, State.MOVING), state, [_text(end.get("ipAddress", "")) for end in ends], labels)


def request(said: dict[str, Any]) -> Seen:
    """Of a queued resource. Raises ValueError."""
    about = said.get("state")
    if not isinstance(about, dict):
        raise ValueError("it has no state")
    word = _text(about.get("state"))
    state = _REQUEST.get(word, State.WAITING)
    why = re.search(r'"message": "((?:[^"\\]|\\.)*)"', json.dumps(about))
    labels = re.search(r'"labels": (\{[^{}]*\})', json.dumps(said))
    return Seen(state, why[1] if state is State.FAILED and why else word, [], json.loads(labels[1]) if labels else {})


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value


def last_line(text: str) -> str:
    """The last error, or the last line that says something. Errors of the service may come as JSON, and have details after them."""
    if messages := re.findall(r'"message": "((?:[^"\\]|\\.)*)"', text):
        return messages[-1].replace('\\"', '"')
    lines = [line.strip() for line in text.splitlines() if re.search(r"\w", line)]
    # What failed on a worker is said between what gcloud says of ssh.
    own = [line for line in lines if not re.search("exited with return code|Attempting to connect", line)]
    errors = [line for line in own if line.startswith("ERROR:")]
    return (errors or own or lines or [""])[-1]


# What helps a person, by what was said.
_ADVICE = {
    "quota": "launcher.zone, launcher.provisioning and launcher.accelerator_type say which quota is asked for",
    "zone": "launcher.zone names the zone",
    "location": "launcher.zone names the zone",
    "runtime": "launcher.runtime_version names the software; gcloud compute tpus tpu-vm versions list shows what there is",
    "in use": "launcher.name gives the slices of a sweep other names",
    "network": "launcher.network and launcher.subnetwork name it",
    "service account": "launcher.service_account names it",
    "login": "gcloud auth login",
    "active account": "gcloud auth login",
    "credentials": "gcloud auth login",
    "permission": "launcher.project names the project",
}


def advice(text: str) -> str:
    """In brackets, where something is known that helps against an error."""
    return next((f" ({hint})" for word, hint in _ADVICE.items() if word in text.lower()), "")
