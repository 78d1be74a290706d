"""An engine that says what tests want, and its tokenizer."""

from labkit.engine.engine_protocol import TokenEvent


class Words:
    """A tokenizer whose ids are characters."""

    template = None

    def encode(self, text):
        return [ord(letter) for letter in text]

    def piece(self, token):
        return chr(token)

    def decode(self, ids):
        return "".join(map(chr, ids))


class Engine:
    """Says "a" for every request in every step, until it is told otherwise."""

    name = "fake"

    def __init__(self):
        self.left, self.aborted, self.closed = {}, [], False
        self.before_step = lambda: None

    def submit(self, request):
        self.left[request.request_id] = request.params.max_tokens

    def abort(self, request_id):
        self.aborted.append(request_id)
        self.left.pop(request_id, None)

    def has_work(self):
        return bool(self.left)

    def step(self):
        self.before_step()
        events = []
        for request_id in list(self.left):
            self.left[request_id] -= 1
            done = not self.left[request_id]
            events.append(TokenEvent(request_id, ord("a"), "length" if done else None))
            if done:
                del self.left[request_id]
        return events

    def counters(self):
        return {}

    def reset_counters(self):
        pass

    def clear_cache(self):
        pass

    def close(self):
        self.closed = True
