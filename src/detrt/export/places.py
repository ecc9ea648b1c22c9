"""Fingerprints of the library code that the rewrites rely on. Written by make_places.py."""

TRIED = ("5.23.0",)

FINGERPRINTS: dict[str, tuple[str, ...]] = {
    "modeling_d_fine:multi_scale_deformable_attention_v2": ("a2f4f35b651aeb36",),
    "modeling_deformable_detr:DeformableDetrEncoder.get_reference_points": ("21e119814bd280ee",),
    "modeling_deformable_detr:DeformableDetrModel.forward": ("e3a4b576a446c266",),
    "modeling_deformable_detr:DeformableDetrModel.gen_encoder_output_proposals": ("cf2ac8b98a7a3f1c",),
    "modeling_deformable_detr:MultiScaleDeformableAttention.forward": ("c21b48c80c88a553",),
    "modeling_deimv2:multi_scale_deformable_attention_v2": ("a2f4f35b651aeb36",),
    "modeling_lw_detr:LwDetrModel.forward": ("6842be7061f6eb63",),
    "modeling_lw_detr:LwDetrModel.gen_encoder_output_proposals": ("3bdc32ee4500d2ff",),
    "modeling_lw_detr:MultiScaleDeformableAttention.forward": ("c21b48c80c88a553",),
    "modeling_rf_detr:MultiScaleDeformableAttention.forward": ("c21b48c80c88a553",),
    "modeling_rf_detr:RfDetrDinov2Embeddings.interpolate_pos_encoding": ("aad1b5dd93675339",),
    "modeling_rf_detr:RfDetrModel.forward": ("9058633959d0bb28",),
    "modeling_rf_detr:RfDetrModel.gen_encoder_output_proposals": ("3bdc32ee4500d2ff",),
    "modeling_rt_detr:MultiScaleDeformableAttention.forward": ("c21b48c80c88a553",),
    "modeling_rt_detr_v2:multi_scale_deformable_attention_v2": ("a2f4f35b651aeb36",),
}
