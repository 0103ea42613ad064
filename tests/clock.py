"A clock that stands still while the machine does: what a promise of seconds is measured with on a loaded machine."
import threading
import time


class Clock:
    """Seconds since its start, counted by a thread that sleeps between counts. Where that thread is kept waiting, for
    longer than a tenth, the rest is the machine's and is not counted."""
    def __enter__(self):
        self.seconds, self.runs = 0., True
        self.thread = threading.Thread(target=self.count, daemon=True)
        self.thread.start()
        return self

    def count(self):
        last = time.monotonic()
        while self.runs:
            time.sleep(.01)
            now = time.monotonic()
            self.seconds, last = self.seconds + min(now - last, .1), now

    def __exit__(self, *error):
        self.runs = False
        self.thread.join()
