"""Count of attributes that are set on other objects, taken from the syntax tree.

An object's attributes are set by its own class: by `self.x = ...` in a method, or by `cls.x = ...`.
Everything else that sets or deletes an attribute of an object of ours is a case: `other.x = ...`,
`setattr(other, ...)`, `object.__setattr__(other, ...)`, `delattr`, and `other.__dict__` or
`vars(other)` where they are changed. Methods of a class may set attributes of other instances of
it, of its base classes and of its subclasses.

Objects of the standard library and of other packages do not count. The tree tells the class of an
object from annotations, from calls of classes and of functions with an annotated result, from
imports, and from the fields and attributes of a class of ours. Where it does not tell, a name that
some class of ours declares as an attribute counts, and so does a name that is computed: setting any
other name on an object of ours is an error of mypy. `INSIDE_TRAINING` names the exceptions.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from benchmarks.source import Module

#: Packages that run inside training processes: objects of unknown classes are torch's there, or
#: those of a framework, which are changed so that they do what the configuration says.
INSIDE_TRAINING = ("tuner.workload.hook", "tuner.workload.program", "tuner.deploy.frameworks")
#: Class of an object that is not ours.
FOREIGN = "(foreign)"

_CHANGE_OF_A_DICTIONARY = ("update", "setdefault", "pop", "clear")
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class OwnClass:
    """A class of production code: its bases, its attributes with their types, and its methods."""

    bases: list[str] = field(default_factory=list)
    attributes: dict[str, tuple[Module, ast.expr | None, ast.expr | None]] = field(
        default_factory=dict
    )
    methods: dict[str, tuple[Module, _Function]] = field(default_factory=dict)


def _last_name(node: ast.AST | None) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _parsed(annotation: ast.expr) -> ast.expr:
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return ast.parse(annotation.value, mode="eval").body
    return annotation


def _parameters(node: _Function) -> list[ast.arg]:
    return [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]


def _imports(module: Module) -> dict[str, str]:
    """Return the module of each name that a module imports."""
    found = {}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom):
            found |= {each.asname or each.name: node.module or "" for each in node.names}
        elif isinstance(node, ast.Import):
            found |= {each.asname or each.name.partition(".")[0]: each.name for each in node.names}
    return found


class Types:
    """Classes of production code, and the class of an expression as far as the tree tells."""

    def __init__(self, modules: Sequence[Module]) -> None:
        self.classes: dict[str, OwnClass] = {}
        self.functions: dict[str, tuple[Module, _Function]] = {}
        self._imports = {module.name: _imports(module) for module in modules}
        for module in modules:
            for node in module.tree.body:
                if isinstance(node, _Function):
                    self.functions[f"{module.name}.{node.name}"] = (module, node)
            for _, node in module.definitions():
                if isinstance(node, ast.ClassDef):
                    self._add(module, node)

    def _add(self, module: Module, node: ast.ClassDef) -> None:
        own = self.classes.setdefault(node.name, OwnClass())
        own.bases += [_last_name(base) for base in node.bases]
        for child in node.body:
            if isinstance(child, ast.AnnAssign):
                own.attributes[_last_name(child.target)] = (module, child.annotation, None)
            elif isinstance(child, _Function):
                own.methods[child.name] = (module, child)
                self._add_set_in(module, own, child)

    @staticmethod
    def _add_set_in(module: Module, own: OwnClass, method: _Function) -> None:
        annotations = {each.arg: each.annotation for each in _parameters(method)}
        for node in ast.walk(method):
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in _flat(targets):
                    if isinstance(target, ast.Attribute) and _last_name(target.value) == "self":
                        stated = getattr(node, "annotation", None)
                        given = annotations.get(_last_name(node.value))
                        known = (module, stated or given, node.value)
                        own.attributes.setdefault(target.attr, known)

    @cached_property
    def attribute_names(self) -> set[str]:
        """Names of the attributes that classes of ours declare."""
        return {name for own in self.classes.values() for name in own.attributes}

    def may_be_ours(self, module: Module, name: str | None) -> bool:
        """Return whether an object of unknown class may be ours, by the attribute that is set."""
        if module.name.startswith(INSIDE_TRAINING):
            return False
        return name is None or name in self.attribute_names

    def related(self, one: str, other: str) -> bool:
        """Return whether one of two classes derives from the other, or both are the same."""
        return one in self._line(other) or other in self._line(one)

    def _line(self, name: str) -> set[str]:
        found, rest = set(), [name]
        while rest:
            if (each := rest.pop()) not in found:
                found.add(each)
                rest += self.classes[each].bases if each in self.classes else []
        return found

    def _declared(self, owner: str, name: str, kind: str) -> tuple | None:
        for each in [owner, *sorted(self._line(owner) - {owner})]:
            if each in self.classes and name in getattr(self.classes[each], kind):
                return getattr(self.classes[each], kind)[name]
        return None

    def of_annotation(self, module: Module, annotation: ast.expr | None) -> str | None:
        """Return the class that an annotation names: one of ours, FOREIGN, or None if unknown."""
        if annotation is None:
            return None
        node = _parsed(annotation)
        if isinstance(node, ast.BinOp):
            found = {self.of_annotation(module, each) for each in (node.left, node.right)}
            own = found & set(self.classes)
            return own.pop() if own else (FOREIGN if found == {FOREIGN} else None)
        if isinstance(node, ast.Constant):  # None
            return FOREIGN
        if isinstance(node, ast.Subscript):
            if _last_name(node.value) in ("Optional", "type"):
                return self.of_annotation(module, node.slice)
            return self.of_annotation(module, node.value)
        return self._of_class(module, node)

    def _of_class(self, module: Module, node: ast.expr) -> str | None:
        name, root = _last_name(node), node
        while isinstance(root, ast.Attribute):
            root = root.value
        origin = self._imports[module.name].get(_last_name(root))
        if origin is not None and origin.partition(".")[0] != "tuner":
            return None if name == "Any" else FOREIGN
        if name in self.classes:
            return name
        return FOREIGN if hasattr(builtins, name) and name != "object" else None

    def of(self, module: Module, node: ast.expr, scope: Scope) -> str | None:
        """Return the class of an expression: one of ours, FOREIGN, or None if unknown."""
        if isinstance(node, ast.Name):
            return self._of_name(module, node.id, scope)
        if isinstance(node, ast.Attribute):
            owner = self.of(module, node.value, scope)
            if owner in (None, FOREIGN):
                return owner
            declared = self._declared(str(owner), node.attr, "attributes")
            if declared is not None:
                return self._of_declared(*declared)
            method = self._declared(str(owner), node.attr, "methods")  # a property
            return self.of_annotation(method[0], method[1].returns) if method else None
        if isinstance(node, ast.Call):
            return self._of_call(module, node, scope)
        if isinstance(node, ast.Constant | ast.List | ast.Dict | ast.Set | ast.Tuple):
            return FOREIGN
        return None

    def _of_declared(
        self, module: Module, annotation: ast.expr | None, value: ast.expr | None
    ) -> str | None:
        if annotation is not None:
            return self.of_annotation(module, annotation)
        return None if value is None else self.of(module, value, Scope())

    def _of_name(self, module: Module, name: str, scope: Scope) -> str | None:
        if scope.owner and name in ("self", "cls"):
            return scope.owner
        for known in scope.bindings:
            if name in known:
                return self._of_binding(module, name, *known[name], scope)
        origin = self._imports[module.name].get(name)
        if origin is not None:
            ours = origin.partition(".")[0] == "tuner"
            return (name if name in self.classes else None) if ours else FOREIGN
        return name if name in self.classes else None

    def _of_binding(
        self,
        module: Module,
        name: str,
        annotation: ast.expr | None,
        value: ast.expr | None,
        scope: Scope,
    ) -> str | None:
        if annotation is not None:
            return self.of_annotation(module, annotation)
        if value is None:
            return None
        return self.of(module, value, scope.without(name))

    def _of_call(self, module: Module, node: ast.Call, scope: Scope) -> str | None:
        function = node.func
        if isinstance(function, ast.Attribute):
            owner = self.of(module, function.value, scope)
            if owner == FOREIGN:
                return FOREIGN
            method = self._declared(owner, function.attr, "methods") if owner else None
            if method is not None and _last_name(method[1].returns) != "Self":
                return self.of_annotation(method[0], method[1].returns)
            if method is not None:
                return owner
            return owner if function.attr == "__new__" else self._of_class(module, function)
        name = _last_name(function)
        if name == "cls" and scope.owner:
            return scope.owner
        origin = self._imports[module.name].get(name, module.name)
        known = self.functions.get(f"{origin}.{name}")
        if known is not None:
            return self.of_annotation(known[0], known[1].returns)
        return self._of_class(module, function)


def _flat(targets: Sequence[ast.expr]) -> Iterator[ast.expr]:
    for target in targets:
        if isinstance(target, ast.Tuple | ast.List):
            yield from _flat(target.elts)
        else:
            yield target


_Bindings = dict[str, tuple[ast.expr | None, ast.expr | None]]


def _bound_by(nodes: Iterable[ast.AST]) -> _Bindings:
    """Return the names that statements bind, each with its annotation and its first value."""
    bound: _Bindings = {}
    for node in nodes:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            bound[node.target.id] = (node.annotation, node.value)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    bound.setdefault(target.id, (None, node.value))
        elif isinstance(node, ast.withitem) and isinstance(node.optional_vars, ast.Name):
            bound.setdefault(node.optional_vars.id, (None, node.context_expr))
    return bound


@dataclass
class Scope:
    """Class of the method around a node, and the names bound in the functions around it."""

    owner: str = ""
    bindings: list[_Bindings] = field(default_factory=list)

    def inside(self, function: _Function, in_class: str) -> Scope:
        """Return the scope of the body of a function."""
        bound: _Bindings = {each.arg: (each.annotation, None) for each in _parameters(function)}
        owner = self.owner
        first = next(iter(bound), "")
        if in_class and first in ("self", "cls"):
            owner = in_class
        elif first in ("self", "cls") or "self" in bound:
            owner = ""  # a function that only calls its argument so
        if owner:
            bound = {name: of for name, of in bound.items() if name not in ("self", "cls")}
        bound = {**_bound_by(ast.walk(function)), **bound}
        return Scope(owner, [bound, *self.bindings])

    def without(self, name: str) -> Scope:
        """Return the scope without a name, whose value may use the name itself."""
        rest = [{k: v for k, v in each.items() if k != name} for each in self.bindings]
        return Scope(self.owner, rest)


def _set_by(node: ast.AST) -> Iterator[tuple[ast.expr, str | None]]:
    """Return the objects whose attributes a node sets, with the name; None if it is computed."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
        yield node.value, node.attr
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
        yield from _by_dictionary(node.value)
    elif isinstance(node, ast.Call):
        function = _last_name(node.func)
        if function in ("setattr", "delattr", "__setattr__", "__delattr__") and node.args:
            name = node.args[1] if len(node.args) > 1 else None
            yield node.args[0], str(name.value) if isinstance(name, ast.Constant) else None
        elif isinstance(node.func, ast.Attribute) and function in _CHANGE_OF_A_DICTIONARY:
            yield from _by_dictionary(node.func.value)


def _by_dictionary(node: ast.expr) -> Iterator[tuple[ast.expr, None]]:
    if isinstance(node, ast.Attribute) and node.attr == "__dict__":
        yield node.value, None
    elif isinstance(node, ast.Call) and _last_name(node.func) == "vars" and node.args:
        yield node.args[0], None


def attributes_set_on_others(modules: Sequence[Module]) -> list[str]:
    """Return the places that set an attribute on an object of another class of ours."""
    types = Types(modules)
    found: list[str] = []

    def visit(module: Module, node: ast.AST, scope: Scope, in_class: str) -> None:
        for value, name in _set_by(node):
            of = types.of(module, value, scope)
            if of == FOREIGN or (of and scope.owner and types.related(of, scope.owner)):
                continue
            if of is None and not types.may_be_ours(module, name):
                continue
            line = getattr(node, "lineno", 0)
            text = module.text.splitlines()[line - 1].strip()
            found.append(f"{module.name}:{line} {of or 'unknown'}: {text}")
        inner, inner_class = scope, in_class
        if isinstance(node, _Function):
            inner, inner_class = scope.inside(node, in_class), ""
        elif isinstance(node, ast.ClassDef):
            inner, inner_class = Scope("", scope.bindings), node.name
        for child in ast.iter_child_nodes(node):
            visit(module, child, inner, inner_class)

    for module in modules:
        visit(module, module.tree, Scope("", [_bound_by(module.tree.body)]), "")
    return found
