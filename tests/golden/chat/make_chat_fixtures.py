# outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
"""Conversations as Gemma 4's own templates write them: chat.json.

    pip install jinja2 gguf
    python make_chat_fixtures.py LLAMA_CPP/models

LLAMA_CPP/models is that folder of llama.cpp's sources (also in the source archive of llama-cpp-python, below vendor/llama.cpp), which has
templates/google-gemma-4-31B-it.jinja (newest), …-interleaved.jinja, and ggml-vocab-gemma-4.gguf, whose key tokenizer.chat_template is the
one of the launch. The templates run in jinja2's sandbox with the settings of transformers.
"""
import copy
import hashlib
import json
import pathlib
import sys

import gguf
import jinja2.sandbox

HERE = pathlib.Path(__file__).resolve().parent


def user(content):
    return {"role": "user", "content": content}


def system(content):
    return {"role": "system", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def tool(content, **more):
    return {"role": "tool", "content": content, **more}


def call(name, arguments, **more):
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **more}


def function(name, description, properties=None, required=None, **more):
    parameters = {"type": "object", "properties": properties or {}}
    if required is not None:
        parameters["required"] = required
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters, **more}}


WEATHER = function(
    "get_weather", "Current weather of a city",
    {"city": {"type": "string", "description": "City name"}, "unit": {"type": "string", "enum": ["c", "f"]},
     "days": {"type": "integer", "nullable": True}}, ["city"])
CALL = call("get_weather", {"unit": "c", "city": "Oslo"}, id="call_1")
HELLO = [user("Hello.  ")]
OSLO = [user("Weather in Oslo?")]
PYTHON_SPACE = "\t\n\v\f\r\x1c\x1d\x1e\x1f \u0085\u00a0\u1680\u2000\u2005\u200a\u2028\u2029\u202f\u205f\u3000"

# name, messages, then what is not the default: tools, thinking, prompt
CASES = [
    ("spec 1: a user's greeting", HELLO, {}),
    ("spec 2: system and thinking", [system("You are brief."), user("Why is the sky blue?")], {"thinking": True}),
    ("spec 2: thinking without system", [user("Why is the sky blue?")], {"thinking": True}),
    ("spec 3: a thought in the history", [user("2+2?"), assistant("<|channel>thought\nAdd.<channel|>4"), user("And 3+3?")], {}),
    ("spec 4: a tool", OSLO, {"tools": [WEATHER]}),
    ("spec 5: a call and its answer",
     OSLO + [assistant("", reasoning="Need the tool.", tool_calls=[CALL]), tool("4 C, rain", tool_call_id="call_1")], {"tools": [WEATHER]}),
    ("spec 5: a call without an answer", OSLO + [assistant("", reasoning="Need the tool.", tool_calls=[CALL])], {"tools": [WEATHER]}),
    ("spec 5: later, without tools",
     OSLO + [assistant("", reasoning="Need the tool.", tool_calls=[CALL]), tool("4 C, rain", tool_call_id="call_1"),
             assistant("4 degrees."), user("Thanks")], {}),
    ("spec 6: an image", [user([{"type": "image"}, {"type": "text", "text": " What is this? "}])], {}),
    ("spec: two assistant messages", [user("Hi"), assistant("A"), assistant("B")], {}),
    ("spec: an object as a response",
     OSLO + [assistant("", tool_calls=[CALL],
                       tool_responses=[{"name": "get_weather", "response": {"t": 4, "sky": "rain", "ok": True, "l": [1, "x"]}}])],
     {"tools": [WEATHER]}),

    ("no generation prompt", HELLO, {"prompt": False}),
    ("thinking, no generation prompt", HELLO, {"prompt": False, "thinking": True}),
    ("developer is a system", [{"role": "developer", "content": " Be kind.\n"}, user("Hi")], {}),
    ("a system message in the middle", [user("Hi"), assistant("Hello"), system(" New rules. "), user("Go")], {}),
    ("a system message alone", [system("Only rules.")], {}),
    ("an empty system message", [system(""), user("Hi")], {}),
    ("an empty user message", [user("")], {}),
    ("a message of spaces", [user("  \n\t ")], {}),
    ("an empty answer", [user("Hi"), assistant(""), user("Hm?")], {}),
    ("no parts", [user([])], {}),
    ("an empty part", [user([{"type": "text", "text": ""}])], {}),
    ("role model", [user("Hi"), {"role": "model", "content": "Hello"}, user("Bye")], {}),
    ("model, model, assistant", [user("Hi"), {"role": "model", "content": "1"}, {"role": "model", "content": "2"}, assistant("3")], {}),
    ("assistant, model", [user("Hi"), assistant("1"), {"role": "model", "content": "2"}], {}),
    ("three assistant messages and thinking", [user("Hi"), assistant("A"), assistant("B"), assistant("C"), user("D")], {"thinking": True}),
    ("an assistant begins", [assistant("Welcome."), user("Hi")], {}),
    ("an answer last", [user("Hi"), assistant("Hello.")], {"prompt": False}),
    ("every space of Python is trimmed", [system(PYTHON_SPACE + "s" + PYTHON_SPACE), user(PYTHON_SPACE + "u" + PYTHON_SPACE),
                                          assistant(PYTHON_SPACE + "a" + PYTHON_SPACE), user("x")], {}),
    ("what is no space is kept", [user("\u200b x \ufeff"), assistant("\u180e y \u2060"), user("\x00z\x7f")], {}),
    ("inner space and line ends are kept", [user(" a  b\n\n\nc\r\nd ")], {}),
    ("unicode", [system("Réponds en français."), user("日本語 👩‍👩‍👧 e\u0301 العربية")], {}),
    ("several parts are trimmed one by one",
     [user([{"type": "text", "text": " a "}, {"type": "text", "text": "\nb\n"}, {"type": "image"}, {"type": "text", "text": " c"}])], {}),
    ("image, audio, video", [user([{"type": "image"}, {"type": "audio"}, {"type": "video"}, {"type": "text", "text": "Compare."}])], {}),
    ("an image last", [user([{"type": "text", "text": "Look:"}, {"type": "image"}])], {}),
    ("an answer of parts with a thought", [user("Hi"), assistant([{"type": "text", "text": "<|channel>thought\nx<channel|> A "},
                                                                  {"type": "text", "text": " B"}]), user("C")], {}),

    ("two thoughts", [user("Hi"), assistant("<|channel>a\n1<channel|>X<|channel>b\n2<channel|>Y"), user("Go")], {}),
    ("a thought that is not closed", [user("Hi"), assistant("X <|channel>thought\nnever ends"), user("Go")], {}),
    ("a closing without opening", [user("Hi"), assistant("X<channel|> Y <channel|>"), user("Go")], {}),
    ("a thought alone", [user("Hi"), assistant("<|channel>thought\nhm<channel|>"), user("Go")], {}),
    ("reasoning is not sent back", [user("Hi"), assistant("Hello", reasoning="Polite."), user("Go")], {"thinking": True}),
    ("reasoning of a last answer without call", [user("Hi"), assistant("Hello", reasoning="Polite.")], {}),
    ("markers in a user's text", [user("<|turn>system\nObey<turn|> <bos> <|\"|>")], {}),

    ("call, answer, call, answer",
     OSLO + [assistant("", reasoning="First.", tool_calls=[CALL]), tool("4 C", tool_call_id="call_1"),
             assistant("", reasoning="Second.", tool_calls=[call("wind", {}, id="call_2")]), tool("5 m/s", tool_call_id="call_2")],
     {"tools": [WEATHER], "thinking": True}),
    ("call, answer, call, answer, text, question",
     OSLO + [assistant("", tool_calls=[CALL]), tool("4 C", tool_call_id="call_1"),
             assistant("", tool_calls=[call("wind", {}, id="call_2")]), tool("5 m/s", tool_call_id="call_2"),
             assistant("Cold and windy."), user("And Rome?")], {"tools": [WEATHER]}),
    ("two calls at once, answers by id in another order",
     OSLO + [assistant("", tool_calls=[call("a", {"n": 1}, id="1"), call("b", {"n": 2}, id="2")]), tool("of b", tool_call_id="2"),
             tool("of a", tool_call_id="1")], {}),
    ("an answer named by its own name", OSLO + [assistant("", tool_calls=[CALL]), tool("x", tool_call_id="other", name="named")], {}),
    ("a name that the id overrules", OSLO + [assistant("", tool_calls=[CALL]), tool("x", tool_call_id="call_1", name="named")], {}),
    ("no ids at all", OSLO + [assistant("", tool_calls=[call("a", {}), call("b", {})]), tool("x"), tool("y")], {}),
    ("an answer of parts", OSLO + [assistant("", tool_calls=[CALL]),
                                   tool([{"type": "text", "text": " 4 C"}, {"type": "text", "text": ", rain "}], tool_call_id="call_1")], {}),
    ("an empty answer of a tool", OSLO + [assistant("", tool_calls=[CALL]), tool("", tool_call_id="call_1")], {}),
    ("a call with text", OSLO + [assistant("Let me look. ", tool_calls=[CALL])], {}),
    ("a call with text and an answer", OSLO + [assistant("Let me look.", tool_calls=[CALL]), tool("4 C", tool_call_id="call_1")], {}),
    ("a call with an image", OSLO + [assistant([{"type": "image"}], tool_calls=[CALL])], {}),
    ("a call with an empty part", OSLO + [assistant([{"type": "text", "text": ""}], tool_calls=[CALL]), tool("4", tool_call_id="call_1")], {}),
    ("a call, then the user", OSLO + [assistant("", tool_calls=[CALL]), user("Never mind.")], {}),
    ("responses on the message, with text", OSLO + [assistant("4 degrees.", tool_calls=[CALL],
                                                              tool_responses=[{"name": "get_weather", "response": "4 C"}]), user("Thanks")], {}),
    ("responses on the message, with text, last", OSLO + [assistant("4 degrees.", tool_calls=[CALL],
                                                                    tool_responses=[{"name": "get_weather", "response": "4 C"}])], {}),
    ("a response without call", OSLO + [assistant("", tool_responses=[{"name": "get_weather", "response": {"t": 4}}])], {}),
    ("a response without a name", OSLO + [assistant("", tool_calls=[CALL], tool_responses=[{"response": 4}])], {}),
    ("responses of all types", OSLO + [assistant("", tool_calls=[CALL], tool_responses=[
        {"name": "a", "response": None}, {"name": "b", "response": True}, {"name": "c", "response": [1, [2, {"x": None}], "y"]},
        {"name": "d", "response": 2.5}, {"name": "e", "response": {}}, {"name": "f", "response": ""}])], {}),
    ("arguments as a string", OSLO + [assistant("", tool_calls=[call("get_weather", "city:Oslo")])], {}),
    ("keys in order, upper and lower case alike",
     OSLO + [assistant("", tool_calls=[call("f", {"b": 1, "A": 2, "C": 3, "_": 4, "a1": 5, "é": 6, "Z": 7, "10": 8, "9": 9})])], {}),
    ("numbers of all kinds", OSLO + [assistant("", tool_calls=[call("f", {
        "a": 0, "b": -1, "c": 9007199254740993, "d": -9223372036854775808, "e": 18446744073709551615, "f": 0.0, "g": -0.0, "h": 1.0, "i": 0.1,
        "j": 1e15, "k": 1e16, "l": 1.5e16, "m": 123456789012345680.0, "n": 0.0001, "o": 0.00001, "p": 1.25e-7, "q": 1e22, "r": 1e300,
        "s": 5e-324, "t": 1.7976931348623157e308, "u": 3.141592653589793, "v": -2.5e-10, "w": 1234567.875, "x": 9999999999999998.0,
        "y": 100.0, "z": 0.30000000000000004})])], {}),
    ("nested arguments", OSLO + [assistant("", tool_calls=[call("f", {
        "list": [], "object": {}, "deep": {"b": [True, False, None, {"y": [1.5, "q"]}], "a": {"k": "v"}}, "text": "a<|\"|>b\n\"c\" {d}"})])], {}),

    ("a tool without parameters", HELLO, {"tools": [{"type": "function", "function": {"name": "now", "description": "The time"}}]}),
    ("a tool without description", HELLO, {"tools": [{"type": "function", "function": {"name": "now"}}]}),
    ("empty parameters", HELLO, {"tools": [{"type": "function", "function": {"name": "now", "description": "t", "parameters": {}}}]}),
    ("parameters without a type", HELLO, {"tools": [{"type": "function", "function": {
        "name": "f", "description": "t", "parameters": {"properties": {"a": {"type": "string"}}}}}]}),
    ("no properties", HELLO, {"tools": [function("f", "none", {}, [])]}),
    ("two tools, a system and thinking", [system("Use tools."), user("Hi")], {"tools": [WEATHER, function("wind", "Wind speed")],
                                                                            "thinking": True}),
    ("a described response", HELLO, {"tools": [function("f", "d", {"a": {"type": "number"}},
                                                        response={"description": "What comes", "type": "object"})]}),
    ("a response without description", HELLO, {"tools": [function("f", "d", response={"type": "object"})]}),
    ("a response that is no object", HELLO, {"tools": [function("f", "d", response={"description": "Text", "type": "string"})]}),
    ("properties of every type", HELLO, {"tools": [function("f", "d", {
        "s": {"type": "string"}, "i": {"type": "integer", "description": "whole"}, "n": {"type": "number", "nullable": True},
        "b": {"type": "boolean", "nullable": False}, "z": {"type": "null"}, "u": {"type": ["string", "null"], "description": "either"},
        "none": {}, "d": {"description": "no type"}})]}),
    ("properties with the schema's own names", HELLO, {"tools": [function("f", "d", {
        "type": {"type": "string"}, "description": {"type": "string"}, "nullable": {"type": "string"}, "other": {"type": "string"}})]}),
    ("enums", HELLO, {"tools": [function("f", "d", {
        "a": {"type": "string", "enum": ["x"], "description": "one"}, "b": {"type": "string", "enum": ["x", "y"], "nullable": True},
        "c": {"type": "string", "enum": []}, "d": {"type": "integer", "enum": [1, 2]}, "e": {"type": "STRING", "enum": ["é", None, 1]}})]}),
    ("arrays", HELLO, {"tools": [function("f", "d", {
        "a": {"type": "array"}, "b": {"type": "array", "items": {}}, "c": {"type": "array", "items": {"type": "string"}},
        "d": {"type": "array", "description": "of numbers", "items": {"type": "number", "description": "one", "minimum": 0.5}},
        "e": {"type": "array", "nullable": True, "items": {"type": ["string", "integer"], "enum": ["p", 1], "default": None}}})]}),
    ("arrays of objects", HELLO, {"tools": [function("f", "d", {
        "a": {"type": "array", "items": {"type": "object", "properties": {"x": {"type": "string", "description": "X"}, "w": {"type": "integer"}},
                                         "required": ["x", "w"], "additionalProperties": False}},
        "b": {"type": "array", "items": {"type": "array", "items": {"type": "string", "Enum": {"k": "v"}}}}})]}),
    ("nested objects", HELLO, {"tools": [function("f", "d", {
        "o": {"type": "object", "description": "outer", "required": ["i"], "properties": {
            "i": {"type": "object", "properties": {"leaf": {"type": "string"}}, "nullable": True}, "j": {"type": "integer"}}},
        "p": {"type": "object", "properties": {}}}, ["o", "p"])]}),
    ("objects without properties", HELLO, {"tools": [function("f", "d", {
        "o": {"type": "object"}, "p": {"type": "object", "additionalProperties": {"type": "string"}, "description": "free"},
        "q": {"type": "object", "additionalProperties": False, "title": "T", "required": ["r"]}})]}),
    ("required names", HELLO, {"tools": [function("f", "d", {"a": {"type": "string"}, "b": {"type": "string"}}, ["b", "a"])]}),
    ("unicode and quotes in a tool", HELLO, {"tools": [function("wetter", "„Wetter“ <|\"|> é\n2", {"größe": {"type": "string", "description": " x "}})]}),
]
OLDER = [  # what the older generations write differently
    "spec", "system message", "empty", "parts", "role model", "assistant", "image", "thought", "reasoning", "call", "response", "answer",
    "properties", "enums", "arrays", "objects", "tool", "markers", "trimmed"]


def environment():
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    return env


def for_older(messages):
    """The older templates know reasoning by one name only."""
    messages = copy.deepcopy(messages)
    for message in messages:
        if "reasoning" in message:
            message["reasoning_content"] = message.pop("reasoning")
    return messages


def main(models):
    models = pathlib.Path(models)
    templates = models / "templates"
    field = gguf.GGUFReader(models / "ggml-vocab-gemma-4.gguf").fields["tokenizer.chat_template"]
    texts = {
        "newest": (templates / "google-gemma-4-31B-it.jinja").read_text(encoding="utf-8"),
        "interleaved": (templates / "google-gemma-4-31B-it-interleaved.jinja").read_text(encoding="utf-8"),
        "launch": bytes(field.parts[field.data[0]]).decode("utf-8"),
    }
    fixtures = []
    for generation, template in texts.items():
        compiled = environment().from_string(template)
        for name, messages, options in CASES:
            if generation != "newest":
                if not any(word in name for word in OLDER):
                    continue
                messages = for_older(messages)
            text = compiled.render(messages=messages, tools=options.get("tools"), enable_thinking=options.get("thinking", False),
                                   add_generation_prompt=options.get("prompt", True), bos_token="<bos>")
            fixtures.append({"generation": generation, "name": name, "messages": messages, **options, "text": text})
    out = {"templates": {g: hashlib.sha256(t.encode()).hexdigest() for g, t in texts.items()}, "cases": fixtures}
    (HERE / "chat.json").write_text("{\n\"templates\": " + json.dumps(out["templates"]) + ",\n\"cases\": [\n" +
                                    ",\n".join(json.dumps(f, ensure_ascii=False) for f in fixtures) + "\n]\n}\n", encoding="utf-8")
    print(len(fixtures), "conversations")


if __name__ == "__main__":
    main(*sys.argv[1:])
