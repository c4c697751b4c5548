"""The registry of methods: ways to make a block skip-free, by name."""

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, ClassVar, Literal, Protocol, TypeVar, get_args, get_origin, get_type_hints, runtime_checkable

from torch import nn

from unskip._core import plugins
from unskip._core.text import nearest
from unskip.coders import CoderBank
from unskip.methods.spec import BlockSpec


@runtime_checkable
class Method(Protocol):
    """A frozen dataclass of options with one function, from BlockSpec to a skip-free block.

    `build` returns None for a block that stays as it is, and raises Unsupported for one that it can't express.
    `keeps_weights` says whether the block's weights live on in the new one. Optional: `finish(model)` changes the
    network outside of its blocks, after them. `exact = True` promises that the network keeps its function; `plainify`
    then asks for eval mode, and sets `spec.nonnegative` where that is proven. `limit` is the largest growth of the
    number of parameters that `plainify` accepts.
    """

    keeps_weights: ClassVar[bool]

    def build(self, spec: BlockSpec, bank: CoderBank) -> nn.Module | None: ...


class BlockMethod:
    """Base class of methods that rebuild every block that has a skip, with fresh weights; others stay as they are."""

    keeps_weights: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_options(self)

    def build(self, spec: BlockSpec, bank: CoderBank) -> nn.Module | None:
        return self.rebuild(spec, bank) if spec.skip else None

    def rebuild(self, spec: BlockSpec, bank: CoderBank) -> nn.Module:
        """Returns the skip-free block that replaces a block with a skip."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option of a method."""

    name: str
    default: Any
    choices: tuple[Any, ...]  # the values of a Literal; empty for other types
    doc: str  # the comment behind the field; empty where there is none, or no source

    @property
    def values(self) -> str:
        """The default and, in brackets, the other choices: 'first' (both)."""
        others = ", ".join(str(choice) for choice in self.choices if choice != self.default)
        shown = f"{self.default:.4g}" if isinstance(self.default, float) else repr(self.default)
        return shown + (f" ({others})" if others else "")


@dataclass(frozen=True, kw_only=True)
class MethodInfo:
    """What a method is and which options it takes, for lists and documentation."""

    name: str
    summary: str  # the first paragraph of its docstring
    options: tuple[Option, ...]


_METHODS: dict[str, type[Method]] = {}
M = TypeVar("M", bound=type[Method])


def register_method(name: str) -> Callable[[M], M]:
    """Decorator: makes a method known to `plainify(model, method=name)`."""

    def register(method: M) -> M:
        if not is_dataclass(method):
            raise ValueError(f"register_method: {method!r} must be a dataclass, whose fields are the method's options.")
        if name in _METHODS:
            raise ValueError(f"register_method: the name {name!r} is taken by {_METHODS[name]!r}; choose another.")
        _METHODS[name] = method
        return method

    return register


def method_names() -> list[str]:
    """The names of all methods, plug-ins included, in alphabetical order."""
    plugins.load("unskip.methods")
    return sorted(_METHODS)


def method_name(method: Method) -> str:
    """The name that a method is registered by; the name of its class where it isn't."""
    return next((name for name, known in _METHODS.items() if type(method) is known), type(method).__name__)


def method_options(name: str) -> list[str]:
    """The option names of a registered method."""
    return [field.name for field in fields(_method(name))]  # type: ignore[arg-type]


def describe_method(name: str) -> MethodInfo:
    """What a registered method is and which options it takes, from its docstring and the comments on its fields."""
    method = _method(name)
    comments: dict[str, str] = {}
    for base in reversed(method.__mro__):  # a subclass may give an option another default and say nothing new about it
        try:
            source = inspect.getsource(base) if is_dataclass(base) else ""
        except OSError:  # an interactive session, or bytecode alone
            source = ""
        comments |= dict(re.findall(r"^ +(\w+): .*?\s#\s+(.+)$", source, flags=re.MULTILINE))
    hints = get_type_hints(method)
    options = [
        Option(
            name=field.name,
            default=field.default if field.default_factory is MISSING else field.default_factory(),
            choices=get_args(hints[field.name]) if get_origin(hints[field.name]) is Literal else (),
            doc=comments.get(field.name, ""),
        )
        for field in fields(method)  # type: ignore[arg-type]
    ]
    summary = " ".join((inspect.getdoc(method) or "").split("\n\n")[0].split())
    return MethodInfo(name=name, summary=summary, options=tuple(options))


def resolve_method(method: str | Method, options: dict[str, Any]) -> Method:
    """The method of this name with its options checked, or a ready method object as it is."""
    if isinstance(method, str):
        known = method_options(method)
        for option in options:
            if option not in known:
                raise ValueError(f"plainify: method {method!r} has no option {option!r}.{nearest(option, known)}")
        return _method(method)(**options)
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


def _method(name: str) -> type[Method]:
    """The class of a method. Plug-ins are loaded for names that aren't ours, so that `import unskip` loads none."""
    if name not in _METHODS and name not in method_names():
        raise ValueError(f"plainify: method={name!r} is not known.{nearest(name, method_names())}")
    return _METHODS[name]


def check_options(method: Method, **choices: tuple[str, ...]) -> None:
    """Refuses option values that don't fit their annotation: a Literal, a finite float, an int, a bool or None.

    Args:
        method: the method, in its `__post_init__`.
        choices: the values of options whose annotation does not list them.
    """
    where, hints = method_name(method), get_type_hints(type(method))
    for field in fields(method):  # type: ignore[arg-type]
        option, value, hint = field.name, getattr(method, field.name), hints[field.name]
        known = choices.get(option, get_args(hint) if get_origin(hint) is Literal else ())
        if known and value not in known:
            raise ValueError(f"{where}: {option}={value!r} is not known. Known: {', '.join(known)}.")
        if hint is float and (option, value) != ("limit", math.inf):
            check_number(where, option, value)
        if hint is int and (isinstance(value, bool) or not isinstance(value, int)):
            raise ValueError(f"{where}: {option}={value!r} must be a whole number.")
        if hint == bool | None and not (value is None or isinstance(value, bool)):
            raise ValueError(f"{where}: {option}={value!r} must be true, false or None (where there is a place).")


def check_number(where: str, option: str, value: object) -> None:
    """Refuses a value that is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{where}: {option}={value!r} must be a finite number.")
