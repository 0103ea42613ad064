"One model, its optimizer and its ranks: plain, FSDP2, ZeRO, tensor and sequence parallel."
