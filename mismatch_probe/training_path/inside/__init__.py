"""Inside a model of transformers: what each place computes is recorded, compared with FP32, or computed in FP32."""
