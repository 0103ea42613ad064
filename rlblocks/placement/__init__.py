"Where wrappers live (this process, torchrun, Ray), and whether what they need fits there."
