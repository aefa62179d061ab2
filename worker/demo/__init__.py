"""The bundled model: its data, its training, its evaluation and the weights it ships as."""
