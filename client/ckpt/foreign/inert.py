"""Reads pickles without running any code that they name, in memory and time that their size bounds.

The only place that reads a pickle: files of torch.save and the metadata of torch.distributed.checkpoint. It interprets
the instructions itself. The only functions that are called are the Makers on an allowlist of names, which check their
arguments; any other name is refused, or stands for a LeftOut. There is no way to an attribute of anything.

Objects of a pickle may be shared, and a checkpoint stores each of them as often as it is referenced. So a Budget
compares the size of the state with the size of the file: a small file never expands to a large state.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from ckptstore.errors import CkptError, UnsupportedObject
from ckptstore.values import Value

MAX_DEPTH = 100
_FREE = 1 << 20
_PER_BYTE = 64
_CONTAINER = 64
_VALUE = 8


@dataclass
class Budget:
    """The size that the state in one file may have, in units of about a byte. For one thread."""

    _path: str
    _most: int
    """Limit for files of any size."""

    def __post_init__(self) -> None:
        self._granted = self.left = min(_FREE, self._most)
        """The units that were granted, and those that are left."""

    def grant(self, num_bytes: int) -> None:
        """Call it before a pickle of this size is read. Raises UnsupportedObject if it is too large to be read."""
        if num_bytes > self._most:
            raise UnsupportedObject(
                f"{self._path} has a pickle of {num_bytes} bytes; the limit is {self._most}",
                "Store numbers as tensors, or import the state in parts",
            )
        more = min(_PER_BYTE * num_bytes, self._most - self._granted)
        self._granted += more
        self.left += more

    def spend(self, units: int) -> None:
        """Raises UnsupportedObject if less is left."""
        self.left -= units
        if self.left < 0:
            raise self.exceeded()

    def exceeded(self) -> UnsupportedObject:
        """The error of a file that needs more than the budget."""
        return UnsupportedObject(
            f"the state in {self._path} is too large: it has too many objects, or repeats some too often",
            "Load it where it was written, and save it with numbers as tensors and without lists, dicts or texts that "
            "are shared many times",
        )

    def spend_on(self, value: Any) -> None:
        """Spend what a tree of containers takes if nothing in it is shared. Raises UnsupportedObject."""
        todo = [(value, 0, 0)]
        while todo:
            item, path_chars, depth = todo.pop()
            kind = type(item)
            if item is None or kind in (bool, float, complex):
                self.spend(_VALUE)
            elif kind is int:
                self.spend(_VALUE + item.bit_length() // 8)
            elif isinstance(item, str | bytes):
                self.spend(_VALUE + len(item))
            else:
                children = _children(item)
                # The name of a leaf, such as a tensor, is its path.
                self.spend(_CONTAINER + 2 * _VALUE * len(children) if children else _CONTAINER + path_chars)
                if children and depth == MAX_DEPTH:
                    raise UnsupportedObject(
                        f"the state in {self._path} is nested more than {MAX_DEPTH} deep", "Does it contain itself?"
                    )
                todo += [(child, path_chars + chars, depth + 1) for child, chars in children]


def _children(item: Any) -> list[tuple[Any, int]]:
    """The objects in a container, and the characters that each adds to the path."""
    if isinstance(item, dict):
        chars = [len(key) if isinstance(key, str) else _VALUE for key in item]
        return [*((key, 0) for key in item), *zip(item.values(), chars, strict=True)]
    if isinstance(item, list | tuple | set | frozenset):
        return [(child, _VALUE) for child in item]
    return [(child, 0) for child in getattr(item, "__dict__", {}).values()]


_PER_INSTRUCTION = 16
_LARGEST_KEY = 1 << 63


class Malformed(Exception):
    """The pickle breaks its own rules; the message says how."""


class LeftOut(Struct, eq=False):
    """An object, or the class or function itself, of a name that is not on the allowlist. Its content is only kept."""

    name: str
    parts: list[Any] = []

    def called(self, args: tuple[Any, ...]) -> LeftOut:
        """An object made from arguments, which are not copied: others may share them."""
        return LeftOut(self.name, [self, args])

    def refusal(self, what: str) -> UnsupportedObject:
        """The error of a file that needs it."""
        return UnsupportedObject(
            f"{what} names {self.name}, which importing without executing code refuses",
            "Load it where it was written, keep only tensors, numbers, strings, lists and dicts, and save that",
        )


class Record:
    """An object of a pickle. Its fields are attributes, or in `state` if they are not named."""

    state: object = None

    def set(self, state: object) -> None:
        """Set the fields."""
        if not isinstance(state, dict):
            self.state = state
        elif all(type(key) is str for key in state):
            self.__dict__.update(state)
        else:
            raise Malformed("a field without a name")


class Maker(Value):
    """A function that a pickle may call. It must check its arguments, and spend a Budget if it copies them."""

    make: Callable[..., Any]


def record_maker(name: str) -> Maker:
    """Makes Records of a class of this name; their arguments are ignored."""
    kind = type(name.rpartition(".")[2], (Record,), {})
    return Maker(lambda *_: kind())


def called(maker: Any, args: Any) -> Any:
    """The object that a function of a pickle makes. Raises Malformed, or TypeError for another number of arguments."""
    if type(maker) not in (Maker, LeftOut) or type(args) is not tuple:
        raise Malformed("a call of something that cannot be called")
    return maker.make(*args) if type(maker) is Maker else maker.called(args)


def ordered_dict() -> OrderedDict[Any, Any]:
    """An empty one: its items follow."""
    return OrderedDict()


def only(kind: type, what: str) -> Maker:
    """Returns its only argument, which is of this kind. what: names the kind."""

    def check(*args: Any) -> Any:
        if list(map(type, args)) == [kind]:
            return args[0]
        raise Malformed(f"{what} was expected")

    return Maker(check)


class PickleReader(Struct):
    """One read of a pickle, once."""

    _data: bytes
    _what: str
    _names: Mapping[str, Any]
    """The globals that the pickle may name, as module.name."""
    _budget: Budget
    """Its user has granted it the size of the data, before reading them."""
    _persistent: Callable[[Any], Any] | None = None
    """Resolves references to other records; other names are then left out."""
    _at: int = 0
    _stack: list[Any] = []
    _marks: list[list[Any]] = []
    """The stacks below the marks."""
    _memo: dict[int, Any] = {}

    def read(self) -> Any:
        """The object. Raises UnsupportedObject for any other name and if the budget is exceeded, Malformed if the
        pickle is damaged."""
        try:
            for count in range(self._budget.left // _PER_INSTRUCTION):
                code = self._data[self._at]
                self._at += 1
                if code == _STOP:
                    self._budget.spend(_PER_INSTRUCTION * count)
                    return self._stack.pop()
                _INSTRUCTIONS[code](self)
        except (IndexError, KeyError, struct.error, UnicodeDecodeError) as error:
            raise Malformed(f"the instruction before byte {self._at} is invalid: {error!r}") from error
        raise self._budget.exceeded()

    # Reading arguments.

    def _take(self, count: int) -> bytes:
        if count < 0:
            raise Malformed("a negative size")
        data = self._data[self._at : self._at + count]
        if len(data) < count:
            raise Malformed("it is truncated")
        self._at += count
        return data

    def _number(self, kind: str) -> Any:
        return struct.unpack(kind, self._take(struct.calcsize(kind)))[0]

    def _line(self) -> str:
        end = self._data.find(b"\n", self._at)
        if end < 0:
            raise Malformed("it is truncated")
        line = self._data[self._at : end]
        self._at = end + 1
        return line.decode()

    def _unmark(self) -> list[Any]:
        items, self._stack = self._stack, self._marks.pop()
        return items

    # Instructions.

    def _mark(self) -> None:
        self._marks.append(self._stack)
        self._stack = []

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _pop(self, count: int) -> list[Any]:
        items = self._stack[-count:]
        if len(items) < count:
            raise IndexError("it lacks items")
        del self._stack[-count:]
        return items

    def _put(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def _extend(self, items: list[Any]) -> None:
        if self._within(items):
            return
        if type(self._stack[-1]) is not list:
            raise Malformed("items are added to something else than a list")
        self._stack[-1].extend(items)

    def _update(self, items: list[Any]) -> None:
        if self._within(items):
            return
        target = self._stack[-1]
        if type(target) not in (dict, OrderedDict) or len(items) % 2:
            raise Malformed("items are set in something else than a dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            check_key(key, self._budget)
            target[key] = value

    def _within(self, items: list[Any]) -> bool:
        """Whether they belong to an object that is left out."""
        if found := isinstance(self._stack[-1], LeftOut):
            self._stack[-1].parts += items
        return found

    def _name(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise Malformed("a name is not text")
        known = f"{_MODULES.get(module, module)}.{name}"
        unknown = LeftOut(known)
        if known not in self._names and self._persistent is None:
            raise unknown.refusal(self._what)
        self._push(self._names.get(known, unknown))

    def _call(self) -> None:
        maker, args = self._pop(2)
        try:
            self._push(called(maker, args))
        except CkptError:
            raise
        except TypeError as error:  # another number of arguments
            unknown = next((one for one in (maker, *args) if type(one) is LeftOut), None)
            if unknown is None:
                raise Malformed(str(error)) from error
            self._push(unknown.called(args))

    def _build(self) -> None:
        state = self._stack.pop()
        target = self._stack[-1]
        if self._within([state]):
            return
        if isinstance(target, Record):
            target.set(state)
        elif type(target) is dict and type(state) is dict:
            self._update([part for item in state.items() for part in item])
        elif type(target) is not OrderedDict:  # its attributes, such as the _metadata of a state dict, are left out
            raise Malformed("a state of something that has none")

    def _resolve(self) -> None:
        if self._persistent is None:
            raise Malformed("it refers to another file")
        self._push(self._persistent(self._stack.pop()))


def check_key(key: Any, budget: Budget) -> None:
    """Raises Malformed if `key` cannot be a key. Otherwise the time to hash it is spent.

    A tuple is hashed whole each time, however its items are shared. Large integers with equal hashes are easy to find.
    """
    todo = [key]
    while todo:
        item = todo.pop()
        if type(item) is tuple:
            budget.spend(_PER_INSTRUCTION * (1 + len(item)))
            todo += item
        elif type(item) is int and not -_LARGEST_KEY < item < _LARGEST_KEY:
            raise Malformed("a key is a very large integer")
        elif type(item).__hash__ is None:
            raise Malformed("a key cannot be hashed")


def _pushes(kind: str) -> Callable[[PickleReader], None]:
    return lambda reader: reader._push(reader._number(kind))


def _pushes_sized(kind: str, convert: Callable[[bytes], Any]) -> Callable[[PickleReader], None]:
    return lambda reader: reader._push(convert(reader._take(reader._number(kind))))


def _long(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def _text(data: bytes) -> str:
    return str(data, "utf-8", "surrogatepass")


_MODULES = {"__builtin__": "builtins"}  # by its name in Python 2, and so in protocol 2
_STOP = ord(".")
_CODES: dict[str, Callable[[PickleReader], object]] = {
    "\x80": lambda reader: reader._take(1),  # PROTO
    "\x95": lambda reader: reader._take(8),  # FRAME
    "(": PickleReader._mark,
    "0": lambda reader: reader._pop(1),
    "N": lambda reader: reader._push(None),
    "\x88": lambda reader: reader._push(True),
    "\x89": lambda reader: reader._push(False),
    "J": _pushes("<i"),
    "K": _pushes("<B"),
    "M": _pushes("<H"),
    "G": _pushes(">d"),
    "\x8a": _pushes_sized("<B", _long),
    "\x8b": _pushes_sized("<i", _long),
    "\x8c": _pushes_sized("<B", _text),
    "X": _pushes_sized("<I", _text),
    "\x8d": _pushes_sized("<Q", _text),
    "U": _pushes_sized("<B", _text),
    "T": _pushes_sized("<i", _text),
    "C": _pushes_sized("<B", bytes),
    "B": _pushes_sized("<I", bytes),
    "\x8e": _pushes_sized("<Q", bytes),
    "]": lambda reader: reader._push([]),
    "a": lambda reader: reader._extend(reader._pop(1)),
    "e": lambda reader: reader._extend(reader._unmark()),
    "}": lambda reader: reader._push({}),
    "s": lambda reader: reader._update(reader._pop(2)),
    "u": lambda reader: reader._update(reader._unmark()),
    ")": lambda reader: reader._push(()),
    "t": lambda reader: reader._push(tuple(reader._unmark())),
    "\x85": lambda reader: reader._push(tuple(reader._pop(1))),
    "\x86": lambda reader: reader._push(tuple(reader._pop(2))),
    "\x87": lambda reader: reader._push(tuple(reader._pop(3))),
    "c": lambda reader: reader._name(reader._line(), reader._line()),
    "\x93": lambda reader: reader._name(*reader._pop(2)),
    "R": PickleReader._call,
    "\x81": PickleReader._call,  # NEWOBJ
    "b": PickleReader._build,
    "Q": PickleReader._resolve,
    "q": lambda reader: reader._put(reader._number("<B")),
    "r": lambda reader: reader._put(reader._number("<I")),
    "\x94": lambda reader: reader._put(len(reader._memo)),
    "h": lambda reader: reader._push(reader._memo[reader._number("<B")]),
    "j": lambda reader: reader._push(reader._memo[reader._number("<I")]),
}
"""The operations that torch and protocols 2 to 4 use, by opcode."""
_INSTRUCTIONS = {ord(code): instruction for code, instruction in _CODES.items()}
