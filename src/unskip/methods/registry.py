"""The registry of methods: ways to make a block skip-free, by name."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

from torch import nn

from unskip._core.text import nearest
from unskip.coders import CoderBank
from unskip.methods.spec import BlockSpec


@runtime_checkable
class Method(Protocol):
    """A frozen dataclass of options with one function, from BlockSpec to a skip-free block.

    `build` returns None for a block that is to stay as it is, and raises Unsupported for one that it can't express.
    `keeps_weights` says whether the weights of the given block live on in the new one. A method may have a function
    `finish(network)` too, for what it changes outside of the blocks; it comes last.

    A method with `exact = True` keeps the network's function; `plainify` then asks for eval mode and tells it what is
    known of a block's input. One with a number `limit` is refused where the network would have more than that many
    times its parameters.
    """

    keeps_weights: ClassVar[bool]

    def build(self, spec: BlockSpec, bank: CoderBank) -> nn.Module | None: ...


_METHODS: dict[str, Callable[..., Method]] = {}
M = TypeVar("M", bound=Callable[..., Method])


def register_method(name: str) -> Callable[[M], M]:
    """Decorator: makes a method known to `plainify(model, method=name)`."""

    def register(method: M) -> M:
        if not dataclasses.is_dataclass(method):
            raise ValueError(f"register_method: {method!r} must be a dataclass, whose fields are the method's options.")
        if name in _METHODS:
            raise ValueError(f"register_method: the name {name!r} is taken by {_METHODS[name]!r}; choose another.")
        _METHODS[name] = method
        return method

    return register


def method_names() -> list[str]:
    return sorted(_METHODS)


def method_name(method: Method) -> str:
    """The name that a method is registered by; for another one that of its class."""
    return next((name for name, known in _METHODS.items() if type(method) is known), type(method).__name__)


def method_options(name: str) -> list[str]:
    """The option names of a registered method."""
    return [field.name for field in dataclasses.fields(_METHODS[name])]  # type: ignore[arg-type]


def resolve_method(method: str | Method, options: dict[str, Any]) -> Method:
    """A method by name with its options checked, or a ready method object as it is."""
    if not isinstance(method, str):
        if options:
            raise ValueError(
                f"plainify: the options {sorted(options)} were given beside a ready method object; "
                "set them when you build the object, or give the method by name."
            )
        if isinstance(method, type) or not isinstance(method, Method):
            raise ValueError(
                f"plainify: method={method!r} is neither a name ({', '.join(method_names())}) nor an object with "
                "`build` and `keeps_weights`."
            )
        return method
    if method not in _METHODS:
        raise ValueError(f"plainify: method={method!r} is not known.{nearest(method, method_names())}")
    known = method_options(method)
    for option in options:
        if option not in known:
            raise ValueError(f"plainify: method {method!r} has no option {option!r}.{nearest(option, known)}")
    return _METHODS[method](**options)


def check_choices(where: str, options: object, choices: dict[str, tuple[str, ...]]) -> None:
    """Refuses an option that has none of its known values."""
    for option, known in choices.items():
        value = getattr(options, option)
        if value not in known:
            raise ValueError(f"{where}: {option}={value!r} is not known. Known: {', '.join(known)}.")
