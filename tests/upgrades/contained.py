"""Whether every value of one JSON schema is a value of another, for the kinds of schemas in mpsd's own document."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

_LOWER: Final = ("minimum", "exclusiveMinimum", "minLength")
_UPPER: Final = ("maximum", "maxLength", "maxProperties")
_KNOWN: Final = {
    *_LOWER, *_UPPER, "additionalProperties", "allOf", "anyOf", "contentMediaType", "contentSchema", "default",
    "description", "enum", "format", "items", "oneOf", "pattern", "properties", "propertyNames", "required", "title",
    "type", "x-extensible-enum", "$ref",
}  # fmt: skip


class Document:
    """A document of the API."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.paths: dict[str, dict[str, Any]] = document["paths"]
        self._schemas: dict[str, Any] = document["components"]["schemas"]

    def found(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return the schema behind a reference, else the schema itself, with its forms merged where possible."""
        while "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        unknown = schema.keys() - _KNOWN
        assert not unknown, f"this comparison has to learn what {unknown} mean"
        if isinstance(kinds := schema.get("type"), list):
            rest = {key: value for key, value in schema.items() if key != "type"}
            words = {"enum": [each for each in rest["enum"] if each is not None]} if "enum" in rest else {}
            plain = [{**rest, **words, "type": kind} for kind in kinds if kind != "null"]
            return {"anyOf": [*plain, {"type": "null"}]}
        forms = [self.found(each) for each in schema.get("oneOf", ())]
        return _merged(forms) if forms and all("properties" in each for each in forms) else schema


def _merged(forms: list[dict[str, Any]]) -> dict[str, Any]:
    """Return several forms of an object as one, whose fields are what each form allows.

    A field that some forms lack may be null, which counts as absent there, and is not required.
    """
    properties: dict[str, Any] = {}
    required = {name for each in forms for name in each["required"]}
    for name in {name for each in forms for name in each["properties"]}:
        some = [each["properties"][name] for each in forms if name in each["properties"]]
        if len(some) < len(forms):
            properties[name] = {"anyOf": [*some, {"type": "null"}]}
            required.discard(name)
        else:
            properties[name] = {"allOf": some}
    return {"type": "object", "properties": properties, "required": sorted(required)}


class Comparison:
    """A comparison of two documents: `narrow` has the values, and `wide` must accept them."""

    def __init__(self, narrow: Document, wide: Document, *, strangers: bool) -> None:
        """`strangers` says whether fields unknown to `wide` are harmless, as to a reader of answers."""
        self._narrow = narrow
        self._wide = wide
        self._strangers = strangers

    def differences(self, narrow: dict[str, Any], wide: dict[str, Any], at: str) -> Iterator[str]:
        """Yield every way in which a value of `narrow` may not be valid in `wide`, with its place."""
        narrow, wide = self._narrow.found(narrow), self._wide.found(wide)
        if "allOf" in narrow:
            yield from self.differences(narrow["allOf"][0], wide, at)
        elif "allOf" in wide:
            found = [list(self.differences(narrow, each, at)) for each in wide["allOf"]]
            yield from max(found, key=len)
        elif some := narrow.get("anyOf", narrow.get("oneOf")):
            for each in some:
                yield from self.differences(each, wide, at)
        elif some := wide.get("anyOf", wide.get("oneOf")):
            found = [list(self.differences(narrow, each, at)) for each in some]
            if all(found):
                yield min(found, key=len)[0]
        elif wide:  # an empty schema accepts everything
            yield from self._plain(narrow, wide, at)

    def _plain(self, narrow: dict[str, Any], wide: dict[str, Any], at: str) -> Iterator[str]:
        kinds = {"integer", "number"} if wide.get("type") == "number" else {wide.get("type")}
        if narrow.get("type") not in kinds:
            yield f"{at}: {narrow.get('type')} is no {wide.get('type')}"
            return
        yield from _bounds(narrow, wide, at)
        if "items" in wide:
            yield from self.differences(narrow.get("items", {}), wide["items"], f"{at}[]")
        if wide["type"] == "object":
            yield from self._object(narrow, wide, at)

    def _object(self, narrow: dict[str, Any], wide: dict[str, Any], at: str) -> Iterator[str]:
        had, has = narrow.get("properties", {}), wide.get("properties", {})
        for name in sorted(set(wide.get("required", [])) - set(narrow.get("required", []))):
            yield f"{at}.{name}: it is required"
        for name, schema in had.items():
            if name in has:
                yield from self.differences(schema, has[name], f"{at}.{name}")
            elif not self._strangers:
                yield f"{at}.{name}: it is not known"
        if self._strangers:
            yield from (f"{at}.{name}: it is gone" for name in has if name not in had and "properties" in narrow)
        below = wide.get("additionalProperties")
        if isinstance(below, dict) and isinstance(narrow.get("additionalProperties"), dict):
            yield from self.differences(narrow["additionalProperties"], below, f"{at}.*")


def _bounds(narrow: dict[str, Any], wide: dict[str, Any], at: str) -> Iterator[str]:
    for name in _LOWER:
        if name in wide and narrow.get(name, float("-inf")) < wide[name]:
            yield f"{at}: {name} is {wide[name]}"
    for name in _UPPER:
        if name in wide and narrow.get(name, float("inf")) > wide[name]:
            yield f"{at}: {name} is {wide[name]}"
    for name in ("pattern", "propertyNames"):
        if name in wide and narrow.get(name) != wide[name]:
            yield f"{at}: {name} is {wide[name]}"
    if "enum" in wide and not set(narrow.get("enum", [object()])) <= set(wide["enum"]):
        yield f"{at}: only {wide['enum']}"


def broken(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return what callers of the former API would miss in the present one."""
    old, new = Document(before), Document(now)
    found: list[str] = []
    for path, methods in old.paths.items():
        for method, operation in methods.items():
            at = f"{method.upper()} {path}"
            successor = new.paths.get(path, {}).get(method)
            if successor is None:
                found.append(f"{at}: it is gone")
            else:
                found += _operation(old, new, operation, successor, at)
    return found


def _operation(old: Document, new: Document, was: dict[str, Any], is_: dict[str, Any], at: str) -> Iterator[str]:
    asking, answering = Comparison(old, new, strangers=False), Comparison(new, old, strangers=True)
    had = {(each["in"], each["name"]): each for each in was.get("parameters", [])}
    has = {(each["in"], each["name"]): each for each in is_.get("parameters", [])}
    for key, parameter in had.items():
        if key not in has:
            yield f"{at} {key[1]}: it is gone"
        else:
            yield from asking.differences(parameter["schema"], has[key]["schema"], f"{at} {key[1]}")
    for key, parameter in has.items():
        if parameter.get("required") and not had.get(key, {}).get("required"):
            yield f"{at} {key[1]}: it is required"
    body, needed = was.get("requestBody"), is_.get("requestBody")
    if needed is not None and needed.get("required") and (body is None or not body.get("required")):
        yield f"{at}: it needs a body"
    if body is not None:
        if needed is None:
            yield f"{at}: it takes no body"
        else:
            for kind, content in body["content"].items():
                yield from asking.differences(content["schema"], needed["content"][kind]["schema"], f"{at} asked")
    yield from _answers(answering, was["responses"], is_["responses"], at)


def _answers(comparison: Comparison, was: dict[str, Any], is_: dict[str, Any], at: str) -> Iterator[str]:
    """Compare the answers; an additional error is one more problem document, which every caller can read."""
    for status in sorted({each for each in (was.keys() ^ is_.keys()) if each < "400"}):
        yield f"{at}: {status} is {'gone' if status in was else 'new'}"
    for status, answer in was.items():
        for kind, content in answer.get("content", {}).items() if status in is_ else ():
            now = is_[status].get("content", {}).get(kind)
            if now is None:
                yield f"{at} {status}: no {kind}"
            else:
                yield from comparison.differences(now["schema"], content["schema"], f"{at} {status}")
