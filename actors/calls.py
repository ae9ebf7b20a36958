"""Typed calls to actors: a task, and the method of the actor's class that performs it.

A method is passed as a function (``RolloutActor.explore``) rather than as a string, so that a type
checker compares the arguments with the signature and "go to definition" leads from the client to
the actor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TypeAlias, TypeVar, cast, overload

from ray import ObjectRef

P = ParamSpec("P")
R = TypeVar("R")
X = TypeVar("X")
Y = TypeVar("Y")
Answer: TypeAlias = Any  # return value of a method; ``Caller.call`` gives it its type
Method: TypeAlias = Callable[Concatenate[Answer, P], R]  # unbound method of an actor's class


def resolved(reference: ObjectRef[X]) -> X:
    """Cast ``reference``, an argument of a call, to the type of its object.

    Ray replaces a reference that is itself an argument by the object before the method runs, which
    static types cannot express.
    """
    return cast(X, reference)


@dataclass(frozen=True)
class Task(Generic[R]):
    """A call that may be repeated: it gives the same result for the same key on any actor."""

    key: object  # a ChunkKey, or a tuple of a word and numbers; identifies the task in events
    priority: tuple[int, ...] = ()  # lowest first
    accept: Callable[[R], str | None] | None = None  # why to retry after this answer, or None
    tries: int = 1  # number of answers at most; the last one is used even if rejected


AnyTask: TypeAlias = Task[Answer]


@dataclass(frozen=True)
class Call:
    """A call as it is sent to Ray: the method's name and the arguments, without their types."""

    method: str
    args: tuple[object, ...]
    named: Mapping[str, object]
    returns: int = 1


class Caller(ABC):
    """Something that performs calls: a pool of actors, or one of its members."""

    @abstractmethod
    async def perform(self, task: AnyTask, call: Call) -> Answer:
        """Perform ``call`` and return its answer.

        If the call has several return values, returns a tuple of the first value and references to
        the others.

        Raises:
            RunFailed: the task failed on every allowed attempt, or no actor is left.
            StateLost: the actor had state, and died.
            InputsLost: an object among the arguments no longer exists.
        """

    async def call(
        self, task: Task[R], method: Method[P, R], *args: P.args, **named: P.kwargs
    ) -> R:
        """Call ``method`` and return its result. Raises the same as ``perform``."""
        return cast(R, await self.perform(task, Call(method.__name__, args, named)))

    async def call_each(
        self,
        task: Task[R],
        method: Method[[X, Y], R],
        messages: Callable[[int], Sequence[X]],
        shared: Y,
    ) -> R:
        """Call ``method`` with a separate message for each actor and with ``shared`` for all.

        ``messages`` returns the messages for the given number of actors, by rank. Raises the same
        as ``perform``.
        """
        return await self.call(task, method, messages(1)[0], shared)

    @overload
    async def call_parts(
        self,
        task: Task[R],
        returns: Literal[2],
        method: Method[P, tuple[R, X]],
        *args: P.args,
        **named: P.kwargs,
    ) -> tuple[R, ObjectRef[X]]: ...
    @overload
    async def call_parts(
        self,
        task: Task[R],
        returns: Literal[3],
        method: Method[P, tuple[R, X, Y]],
        *args: P.args,
        **named: P.kwargs,
    ) -> tuple[R, ObjectRef[X], ObjectRef[Y]]: ...
    @overload
    async def call_parts(
        self,
        task: Task[R],
        returns: int,
        method: Method[P, tuple[R, *tuple[X, ...]]],
        *args: P.args,
        **named: P.kwargs,
    ) -> tuple[R, *tuple[ObjectRef[X], ...]]: ...
    async def call_parts(
        self,
        task: AnyTask,
        returns: int,
        method: Callable[..., object],
        *args: object,
        **named: object,
    ) -> tuple[Answer, ...]:
        """Call ``method``; return the first part of its result by value, the others by reference.

        The caller owns the referenced objects, so they outlive the actor that created them. Raises
        the same as ``perform``.
        """
        return await self.perform(task, Call(method.__name__, args, named, returns))
