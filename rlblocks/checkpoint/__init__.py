"Save, resume, convert to a model folder."
