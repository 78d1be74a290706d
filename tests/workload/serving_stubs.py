"""What the tests of serving share: a clock, an engine, and what makes an engine a server."""

from labkit.engine.engine_protocol import TokenEvent


class Clock:
    """Seconds that pass only when an engine steps, or somebody pushes the clock."""

    def __init__(self, now=0.0):
        self.now = now

    def __call__(self):
        return self.now


class StubEngine:
    """A token per live request and step; ``seconds(step, live)`` is what a step takes."""

    name = "stub"

    def __init__(self, base, seconds):
        self.base, self.seconds = base, seconds
        self.live, self.submitted, self.steps, self.computed = {}, [], 0, 0
        self.closed = False

    def submit(self, request):
        self.live[request.request_id] = request.params.max_tokens
        self.submitted.append(request.request_id)

    def has_work(self):
        return bool(self.live)

    def step(self):
        self.base.now += self.seconds(self.steps, len(self.live))
        self.steps += 1
        self.computed += len(self.live)
        events = []
        for request_id in list(self.live):
            self.live[request_id] -= 1
            end = not self.live[request_id]
            events.append(TokenEvent(request_id, self.steps, "length" if end else None, margin=1.0))
            if end:
                del self.live[request_id]
        return events

    def counters(self):
        return {"tokens.computed": float(self.computed)}

    def reset_counters(self):
        self.steps = self.computed = 0

    def clear_cache(self):
        pass

    def close(self):
        self.closed = True


class ServerStub:
    """What a server's client has besides the methods of an engine. ``clock``: the arm's clock."""

    def use_clock(self, clock):
        self.clock = clock

    def wait(self, seconds):
        pass

    def prepare_requests(self, requests, streams):
        pass

    def process_memory(self):
        return {}

    def check_running(self):
        pass
