"""Publishing of exported models: model card, GGUF file and upload to the Hugging Face hub."""
