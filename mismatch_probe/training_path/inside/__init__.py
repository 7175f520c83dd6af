"""Inside a model of transformers: what each place computes, recorded, held against FP32, or computed in FP32."""
