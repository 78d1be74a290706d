"""Requests that try to end or to stop a server, by name, for ``test_hostile``.

A case is a function of a ``Client`` that sends something and checks the answer. To add one,
decorate it with ``case``.
"""

import concurrent.futures
import contextlib
import json
import random
import string

CASES = {}


def case(function):
    """Add a case under its function's name."""
    return add(function.__name__, function)


def add(name, function):
    assert name not in CASES
    CASES[name] = function
    return function


# Schemas --------------------------------------------------------------------------------------

LETTERS = random.Random(0)


def word(length):
    return "".join(LETTERS.choices(string.ascii_letters, k=length))


def nested(schema, depth):
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def patterns(letters):
    return {"type": "string", "allOf": [{"pattern": f".*{letter}.*"} for letter in letters]}


TREE = {"$ref": "#/$defs/node"}
SCHEMAS = {
    "endless_recursion": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    "power_of_repetitions": {"type": "string", "pattern": "^(a{1000}){600}$"},
    "enum_of_520_kB": {"enum": [word(10) for _ in range(40_000)]},
    "enum_below_the_limit": {"enum": [word(10) for _ in range(18_000)]},
    "any_of_5000_objects": {
        "anyOf": [
            {"type": "object", "properties": {f"k{i}": {"type": "integer"}}, "required": [f"k{i}"]}
            for i in range(5000)
        ]
    },
    "any_of_1500_objects": {
        "anyOf": [
            {"type": "object", "properties": {f"k{i}": {"type": "integer"}}, "required": [f"k{i}"]}
            for i in range(1500)
        ]
    },
    "intersection_of_20": patterns("abcdefghijklmnopqrst"),
    "intersection_of_16": patterns("abcdefghijklmnop"),
    "lexer_gives_up": {"type": "string", "pattern": "^.*[aeiou].{500}b.{500}$"},
    "lexer_gives_up_late": {"type": "string", "pattern": "^.*[aeiou].{50}b.{50}$"},
    "slow_masks": {"type": "string", "pattern": "^(a{1000}){60}$"},
    "row_of_500": {
        "type": "object",
        "properties": {
            f"k{i}": {"type": "string", "pattern": f"^[a-z]{{{i}}}.*x$"} for i in range(500)
        },
    },
    # From the issues of llguidance (265, ...) and vLLM (37642, 17313, 19270, 45346, ...).
    "pattern_properties": {
        "type": "object",
        "properties": {"score": {"type": "integer", "multipleOf": 5}},
        "patternProperties": {"^score$": {"type": "integer"}},
        "required": ["score"],
        "additionalProperties": False,
    },
    "empty_alternative": {"type": "string", "pattern": "^(|.*)$"},
    "invalid_regex": {"type": "string", "pattern": "[.*"},
    "regex_with_a_lookahead": {"type": "string", "pattern": "^(?=.*x)(?!.*y).*$"},
    "regex_with_a_reference": {"type": "string", "pattern": r"^(a+)b\1$"},
    "exponential_regex": {"type": "string", "pattern": "^(a+)+(a|aa)*$"},
    "huge_repetition": {"type": "string", "pattern": "^a{1000000000}$"},
    "unicode_classes": {"type": "string", "pattern": r"^\p{L}{1000}\p{N}{1000}$"},
    "empty": {},
    "empty_enum": {"enum": []},
    "no_such_reference": {"$ref": "#/$defs/nothing"},
    "remote_reference": {"$ref": "https://example.com/schema.json"},
    "reference_to_itself": {"$ref": "#"},
    "a_million_items": {"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000},
    "a_long_string": {"type": "string", "minLength": 1_000_000},
    "unique_items": {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True},
    "contradiction": {"type": "integer", "minimum": 5, "maximum": 4},
    "multiple_of_nothing": {"type": "number", "multipleOf": 1e-300},
    "format": {"type": "string", "format": "date-time", "maxLength": 3},
    "not": {"not": {"type": "string"}},
    "conditional": {
        "if": {"type": "string"},
        "then": {"minLength": 3},
        "else": {"type": "integer"},
    },
    "one_of_overlapping": {"oneOf": [{"type": "string"}, {"type": "string", "minLength": 2}]},
    "control_characters": {"type": "object", "properties": {"\0\n\u2028\ud83d": {"const": "\0"}}},
    "recursive_tree": {
        "$defs": {
            "node": {"anyOf": [nested(TREE, 1), {"type": "object", "additionalProperties": TREE}]}
        },
        **TREE,
    },
    "nested_64_deep": nested({"type": "integer"}, 64),
    "nested_900_deep": nested({"type": "integer"}, 900),
}


def check_answer(response):
    """A request ends with an error in one short line, or with JSON text, or at its length."""
    if response.status != 200:
        assert response.status == 400, (response.status, response.text[:500])
        check_message(response.json()["error"]["message"])
        return
    choice = response.json()["choices"][0]
    if choice["finish_reason"] == "stop":
        json.loads(choice["message"]["content"])
    else:
        assert choice["finish_reason"] == "length"


def check_message(message):
    assert message and len(message) < 400 and "\n" not in message, message[:1000]


def check_responses_stream(response):
    if response.status != 200:
        assert response.status == 400
        check_message(response.json()["error"]["message"])
        return
    last = json.loads(response.text.rsplit("data: ", 1)[1])
    if last["type"] == "error":
        check_message(last["message"])
    elif last["type"] == "response.completed":
        json.loads(last["response"]["output"][0]["content"][0]["text"])
    else:
        assert last["type"] == "response.incomplete", last


def chat_schema(schema):
    def send(client):
        response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        check_answer(client.chat(response_format=response_format, max_tokens=64))

    return send


def responses_schema(schema):
    def send(client):
        text_format = {"type": "json_schema", "name": "x", "schema": schema}
        body = {"text": {"format": text_format}, "max_output_tokens": 64, "stream": True}
        check_responses_stream(client.responses(**body))

    return send


for name, schema in SCHEMAS.items():
    add(f"chat_{name}", chat_schema(schema))
    add(f"responses_{name}", responses_schema(schema))


def messages_schema(schema):
    def send(client):
        output_config = {"format": {"type": "json_schema", "schema": schema}}
        response = client.messages(output_config=output_config, max_tokens=64)
        message = response.json()
        if response.status != 200:
            assert response.status == 400, (response.status, response.text[:500])
            check_message(message["error"]["message"])
        elif message["stop_reason"] == "end_turn":
            json.loads(message["content"][0]["text"])
        else:
            assert message["stop_reason"] == "max_tokens"

    return send


for name in ("endless_recursion", "intersection_of_20", "lexer_gives_up_late", "nested_900_deep"):
    add(f"messages_{name}", messages_schema(SCHEMAS[name]))


@case
def many_schemas_that_never_end(client):
    """More than there are processes for; each of them is new to the cache."""

    def send(number):
        schema = {**patterns("abcdefghijklmnopqrst"), "title": str(number)}
        response = client.chat(response_format={"type": "json_schema", "json_schema": {
            "name": "x", "schema": schema}})  # fmt: skip
        assert response.status in (400, 429), response.text
        check_message(response.json()["error"]["message"])

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(send, range(8)))


@case
def tools_with_a_schema_that_never_ends(client):
    function = {"name": "f", "parameters": {"properties": {"a": patterns("abcdefghijklmnopqrst")}}}
    response = client.chat(
        tools=[{"type": "function", "function": function}], tool_choice="required"
    )
    assert response.status == 400
    check_message(response.json()["error"]["message"])


@case
def tools_of_messages_with_a_schema_that_never_ends(client):
    schema = {"properties": {"a": patterns("abcdefghijklmnopqrst")}}
    response = client.messages(
        tools=[{"name": "f", "input_schema": schema}], tool_choice={"type": "any"}, max_tokens=64
    )
    assert response.status == 400
    check_message(response.json()["error"]["message"])


# Prompts --------------------------------------------------------------------------------------


def add_prompt(name, prompt, **options):
    def send(client):
        response = client.post("/v1/completions", prompt=prompt, **options)
        assert response.status == 400, response.text[:500]
        check_message(response.json()["error"]["message"])

    add(name, send)


add_prompt("a_prompt_of_4_million_characters", "a " * 2_000_000)
add_prompt("a_list_of_400_000_prompts", ["a"] * 400_000)
add_prompt("a_million_log_probabilities", [[1] * 2000] * 25, echo=True, logprobs=20, max_tokens=0)


@case
def a_quarter_of_a_million_log_probabilities(client):
    prompts = [[*range(1000)]] * 12
    response = client.post("/v1/completions", prompt=prompts, prompt_logprobs=20, max_tokens=1)
    assert response.status == 200, response.text[:500]
    lengths = [len(choice["prompt_logprobs"]) for choice in response.json()["choices"]]
    assert lengths == [1000] * 12


# Bodies ---------------------------------------------------------------------------------------

SIZE = (4 << 20) - 100
HELLO = '{"role":"user","content":"hello"}'
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


def filled(head, item, tail):
    """Return a body of 4 MB that repeats an item."""
    count = (SIZE - len(head) - len(tail)) // (len(item) + 1)
    return head + ",".join([item] * count) + tail


BODIES = {
    "completions_of_a_million_prompts": ('"prompt":[', "[1]", "]"),
    "completions_of_two_million_ids": ('"prompt":[', "1", "]"),
    "completions_with_a_wrong_prompt_at_the_end": ('"prompt":[', "[1]", ",{}]"),
    "completions_of_a_million_choices": (
        '"prompt":"a","structured_outputs":{"choice":[', '"a"', "]}"
    ),
    "chat_of_200_000_tools": (f'"messages":[{HELLO}],"tools":[', '{"type":"function"}', "]"),
    "chat_of_a_million_empty_tools": (f'"messages":[{HELLO}],"tools":[', "{}", "]"),
    "chat_of_139_000_messages": ('"messages":[', HELLO, "]"),
    "chat_of_100_000_unknown_fields": ('"messages":[', HELLO[:-1] + ',"x":null}', "]"),
    "chat_of_80_000_calls": (
        '"messages":[{"role":"assistant","tool_calls":[',
        '{"id":"","function":{"name":"f","arguments":""}}', "]}]",
    ),
    "chat_of_a_deep_unknown_field": (f'"messages":[{HELLO}],"x":[', "[[[]]]", "]"),
}  # fmt: skip
BIASES = ",".join(f'"{number}":1' for number in range(380_000))
WRONG_VALUES = {
    "completions_of_380_000_biases": f'"prompt":"a","logit_bias":{{{BIASES}}}',
    "completions_of_two_tokens_and_a_half": '"prompt":"a","max_tokens":2.5',
    "completions_of_an_infinite_number": '"prompt":"a","temperature":1e400',
    "completions_of_half_a_character": r'"prompt":"\ud800x"',
    "completions_of_a_part_of_a_token": '"prompt":[1.5]',
    "chat_of_half_a_character_in_a_call": '"messages":[{"role":"assistant","tool_calls":[{"id":"",'
    r'"function":{"name":"f","arguments":"{\"a\":\"\\ud800\"}"}}]}]',
    "chat_of_an_integer_of_5000_digits": f'"messages":[{HELLO}],"seed":{"1" * 5000}',
    "chat_of_a_name_of_a_megabyte": f'"messages":[{HELLO}],"{"x" * (1 << 20)}":1',
}


def add_body(name, fields):
    def send(client):
        path = PATHS[name.partition("_")[0]]
        response = client.send("POST", path, f'{{"model":"tiny",{fields}}}')
        assert response.status == 400, response.text[:500]
        check_message(response.json()["error"]["message"])

    add(name, send)


for name, parts in BODIES.items():
    add_body(name, filled(*parts))
for name, fields in WRONG_VALUES.items():
    add_body(name, fields)


# Preparation ----------------------------------------------------------------------------------


@case
def long_texts(client):
    """More than are tokenised at once. Short ones are served meanwhile."""

    def tokenize(number):
        response = client.post("/tokenize", prompt=f"{number} and another word " * 4000)
        assert response.status == 200, response.text[:500]

    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        list(pool.map(tokenize, range(24)))


TEMPLATE = """\
{%- if messages[0].content == 'for ever' %}
{%- for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}
{%- elif messages[0].content == 'much' %}{{ '%2000000000d' % 1 }}{% endif %}"""


def add_template(name, text, reason):
    def send(client):
        def chat(_):
            messages = [{"role": "user", "content": text}]
            response = client.post("/v1/chat/completions", messages=messages)
            assert response.status == 400, response.text[:500]
            assert reason in response.json()["error"]["message"]

        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            list(pool.map(chat, range(2)))

    add(name, send)


add_template("a_template_that_never_ends", "for ever", "longer than 10 s")
add_template("a_template_that_fills_the_memory", "much", "more than 268435456 bytes")


# Connections ----------------------------------------------------------------------------------


@case
def pipelined_offers_of_http2(client):
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n\r\n"
    with client.connect() as connection:
        connection.sendall((head + offer) * 100 + head + b"Connection: close\r\n\r\n")
        assert read_all(connection).count(b"HTTP/1.1 200 OK") == 101


@case
def a_page_whose_name_points_to_the_server(client):
    with client.connect() as connection:
        connection.sendall(
            b"GET /metrics HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n"
        )
        assert read_all(connection).startswith(b"HTTP/1.1 403 ")


def read_all(connection):
    received = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(1 << 16):
            received += part
    return received


@case
def a_hundred_megabytes_of_headers(client):
    with client.connect() as connection:
        connection.sendall(b"GET /v1/models HTTP/1.1\r\n")
        with contextlib.suppress(ConnectionError):
            for number in range(100):
                connection.sendall(b"x%d: %b\r\n" % (number, b"x" * (1 << 20)))
        assert read_all(connection).split()[1:2] in ([], [b"431"])


@case
def half_sent_requests(client):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n"
    connections = [client.connect() for _ in range(100)]
    for number, connection in enumerate(connections):
        connection.sendall((head + b'\r\n{"model"')[: number + 20])
    answers = [read_all(connection) for connection in connections]
    for connection in connections:
        connection.close()
    assert {answer.split()[1] for answer in answers} == {b"408"}


@case
def clients_that_leave(client):
    body = json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 400, "stream": True})
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connections = [client.connect() for _ in range(200)]
    for connection in connections:
        connection.sendall((head + body).encode())
    for number, connection in enumerate(connections):
        if number % 2:
            connection.recv(200)
        connection.close()


# Sampling -------------------------------------------------------------------------------------


@case
def penalties_that_make_logits_infinite(client):
    response = client.chat(repetition_penalty=1e-320, temperature=1)
    assert response.status == 400
    check_message(response.json()["error"]["message"])
