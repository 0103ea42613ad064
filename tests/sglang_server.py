"""An HTTP server that answers as SGLang's documentation says, with a real model behind it.

It is not SGLang. It is what the client is tested against where SGLang cannot run."""
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from rlblocks.data.media import Media, MediaReader
from rlblocks.models.multimodal import media_arguments
from rlblocks.samplers.hf import Hf
from rlblocks.samplers.sampler import Request, Sampling, complete


class Engine:
    "One model, which answers one request at a time."

    def __init__(self, model, tokenizer=None, original=False, processor=None):
        self.processor = processor
        self.original, self.tokenizer, self.lock, self.aborted = original, tokenizer, threading.Lock(), set()
        self.released, self.counts = [], {}
        self.sampler = Hf(model, device=torch.device("cpu"), tokenizer=tokenizer)

    def health(self, _): return {}

    def generate(self, body):
        with self.lock:
            if body.get("rid") in self.aborted: return self._said([], [], [], "abort", [])
            if self.released: raise RuntimeError("no memory: it is released")
            return self._generate(body)

    @torch.no_grad()
    def _generate(self, body):
        p, (ids, media, kinds) = body["sampling_params"], self._read(body)
        how = Sampling(float(p["temperature"]), 1., max(p.get("top_k", -1), 0), p.get("min_p", 0.))
        asked = Request(0, ids, (p.get("sampling_seed", 0),), p["max_new_tokens"], how,
                        tuple(p.get("stop_token_ids", ())), tuple(p.get("stop", ())), media=media, type_ids=kinds)
        c, = complete(self.sampler, [asked])
        whole = torch.cat([ids, c.tokens])[None]
        kinds = {k: torch.cat([x, torch.zeros_like(c.tokens)])[None] for k, x in kinds.items()}
        more = media_arguments(self.sampler.module, [media], kinds, whole) if media else {}
        z = self.sampler.module(whole, **more).logits[0].float()
        logp = (z[len(ids)-1:-1]/(1. if self.original else how.temperature or 1.)).log_softmax(-1)
        drawn = logp.gather(1, c.tokens[:, None])[:, 0]
        top = logp.topk(min(max(body.get("top_logprobs_num", 0), 1), logp.shape[1]))
        tops = [[(p, i, None) for p, i in zip(*row, strict=True)] for row in
                zip(top.values.tolist(), top.indices.tolist(), strict=True)]
        given = z[:len(ids)-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0].tolist()
        inputs = [(p, i, None) for p, i in zip([None, *given], ids.tolist(), strict=True)]
        if "logprob_start_len" not in body: inputs = []
        return self._said(c.tokens.tolist(), drawn.tolist(), tops, c.reason, inputs, ids.tolist())

    def _read(self, body):
        "The prompt's ids as the model reads them, its media, and the types of ids: a server has its own processor."
        if not body.get("image_data"): return torch.tensor(body["input_ids"]), None, {}
        reader = MediaReader("server", self.processor)
        media = reader.media(dict(images=body["image_data"]))
        word = self.processor.image_token
        alone = [Media((s,), media.maker) for s in media.sources]
        runs = iter([reader.tokenizer.encode(reader.expand([word], x)[0]) for x in alone])
        place = reader.tokenizer.convert_tokens_to_ids(word)
        ids = [i for x in body["input_ids"] for i in (next(runs) if x == place else [x])]
        return torch.tensor(ids), media, {k: torch.tensor(x) for k, x in reader.type_ids(ids).items()}

    def _said(self, ids, logps, tops, why, inputs, prompt=()):
        pairs = [(p, i, None) for p, i in zip(logps, ids, strict=True)]
        return dict(text="", output_ids=ids, prompt_token_ids=list(prompt), meta_info=dict(
            output_token_logprobs=pairs, output_top_logprobs=tops, input_token_logprobs=inputs,
            finish_reason=dict(type=why), completion_tokens=len(ids)))

    def abort_request(self, body):
        self.aborted.add(body["rid"])
        return {}

    def update_weights_from_disk(self, body):
        from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM
        with self.lock:
            try: net = (AutoModelForMultimodalLM if self.processor else AutoModelForCausalLM).from_pretrained(
                body["model_path"])
            except (OSError, ValueError) as e: return dict(success=False, message=str(e))
            self.sampler = Hf(net, device=torch.device("cpu"), tokenizer=self.tokenizer)
        return dict(success=True, message="", weight_version=body["weight_version"])

    def release_memory_occupation(self, body): self.released = body["tags"]; return {}

    def resume_memory_occupation(self, body): self.released = []; return {}


class Handler(BaseHTTPRequestHandler):
    "One connection."

    def answer(self, body):
        engine, name = self.server.engine, self.path[1:]
        engine.counts[name] = engine.counts.get(name, 0) + 1
        try: status, said = 200, getattr(engine, name)(body)
        except Exception as e: status, said = 500, dict(error=dict(message=f"{type(e).__name__}: {e}"))
        sent = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)

    def do_GET(self): self.answer(None)

    def do_POST(self): self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def log_message(self, *_): pass


class Server(ThreadingHTTPServer):
    request_queue_size, daemon_threads = 512, True


def served(model, **how):
    "A server on a free port, its address, and the engine behind it."
    server = Server(("127.0.0.1", 0), Handler)
    server.engine = Engine(model, **how)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, f"http://127.0.0.1:{server.server_address[1]}", server.engine
