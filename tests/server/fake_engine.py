"""A fake engine and its tokenizer."""

from types import MappingProxyType

from chat_model import TEMPLATE

from labkit.engine.engine_protocol import NO_TOKEN, TokenEvent
from labkit.models.chat_template import ChatTemplate


class CharTokenizer:
    """A tokenizer whose ids are the code points of characters; ``encoded`` lists its texts."""

    template = template_error = None
    max_token_characters = 1
    special_tokens = ("<s>",)
    byte_tokens = MappingProxyType({})

    def __init__(self):
        self.encoded = []

    def encode(self, text, *, special=True):
        self.encoded.append(text)
        return [ord(char) for char in text]

    def encode_pieces(self, pieces):
        return [token for piece in pieces for token in self.encode(piece)]

    def render_chat(self, messages, tools=(), options=None):
        return "".join(f"{message['role'][0]}{message['content']}" for message in messages)

    def piece(self, token):
        return chr(token)

    def decode(self, ids):
        return "".join(map(chr, ids))


class ToolTokenizer(CharTokenizer):
    """A tokenizer whose chat template supports tools."""

    template = ChatTemplate(TEMPLATE, {})

    def render_chat(self, messages, tools=(), options=None):
        return self.template.render(messages, tools, options)

    def token_id(self, text):
        return None


class FakeEngine:
    """Generates "a" for every request in every step; ``before_step`` is called before each.

    If ``reply`` is set, every request gets that text instead, and stops at its end.
    """

    name = "fake"

    def __init__(self):
        self.remaining, self.aborted, self.closed = {}, [], False
        self.before_step = lambda: None
        self.reply, self.submitted, self._replies = None, [], {}

    def submit(self, request):
        self.remaining[request.request_id] = request.params.max_tokens
        self.submitted.append(request)
        if self.reply is not None:
            self._replies[request.request_id] = iter(self.reply)

    def abort(self, request_id):
        self.aborted.append(request_id)
        self.remaining.pop(request_id, None)

    def has_work(self):
        return bool(self.remaining)

    def step(self):
        self.before_step()
        events = []
        for request_id in list(self.remaining):
            self.remaining[request_id] -= 1
            reason = None if self.remaining[request_id] else "length"
            char = next(self._replies.get(request_id, iter("a")), None)
            if char is None:
                reason = "stop"
            token = NO_TOKEN if char is None else ord(char)
            events.append(TokenEvent(request_id, token, reason))
            if reason:
                del self.remaining[request_id]
        return events

    def counters(self):
        return {}

    def reset_counters(self):
        pass

    def clear_cache(self):
        pass

    def close(self):
        self.closed = True
