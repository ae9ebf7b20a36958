"""Typed calls to actors: a task, and the method of the actor's class that carries it out.

A method is named by itself (``RolloutActor.explore``), not by a string, so that a type checker
compares the arguments with the signature and an editor leads from the client to the actor.
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
Answer: TypeAlias = Any  # what a method returned, between Ray and ``Caller.call``, which types it
Method: TypeAlias = Callable[Concatenate[Answer, P], R]  # of an actor's class, not bound to one


def resolved(reference: ObjectRef[X]) -> X:
    """``reference``, as an argument whose value the method will see.

    Ray replaces a reference that is itself an argument by its object before the method runs. Static
    types do not know that, hence this cast.
    """
    return cast(X, reference)


@dataclass(frozen=True)
class Task(Generic[R]):
    """A call that may be repeated: the same key gives the same result, on any actor."""

    key: object  # a ChunkKey, or a tuple of a word and numbers; names the task in events
    priority: tuple[int, ...] = ()  # lowest first
    accept: Callable[[R], str | None] | None = None  # why an answer is worth another try elsewhere
    tries: int = 1  # answers that ``accept`` may refuse; the last one stands


AnyTask: TypeAlias = Task[Answer]


@dataclass(frozen=True)
class Call:
    """A method by name, with its arguments; what is left of the types where Ray is called."""

    method: str
    args: tuple[object, ...]
    named: Mapping[str, object]
    returns: int = 1


class Caller(ABC):
    """Something that carries out calls: a pool of actors, or one of its members."""

    @abstractmethod
    async def perform(self, task: AnyTask, call: Call) -> Answer:
        """The answer to ``call``; where it has several returns, the value of the first and
        references to the others, as one tuple.

        Raises:
            RunFailed: the task failed on every allowed attempt, or no actor is left.
            StateLost: the actor held a state, and died.
            InputsLost: an object among the arguments no longer exists.
        """

    async def call(
        self, task: Task[R], method: Method[P, R], *args: P.args, **named: P.kwargs
    ) -> R:
        """What ``method`` returns. Raises as ``perform``."""
        return cast(R, await self.perform(task, Call(method.__name__, args, named)))

    async def call_each(
        self,
        task: Task[R],
        method: Method[[X, Y], R],
        messages: Callable[[int], Sequence[X]],
        shared: Y,
    ) -> R:
        """What ``method`` returns where every actor is sent a message of its own, and ``shared``.

        ``messages`` makes one for each of so many actors, by rank. Raises as ``perform``.
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
        """What ``method`` returns, the first part by value, the others by reference.

        The caller owns what comes by reference, so it outlives the actor that made it. Raises as
        ``perform``.
        """
        return await self.perform(task, Call(method.__name__, args, named, returns))
