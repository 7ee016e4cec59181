{{/* Made by python -m tools.chart_values from the classes of settings. */}}

{{/* What groups get of the shared settings. */}}
{{- define "quire.groupsOfCluster" -}}
drain_timeout_s group_host handover_s log_format log_level otlp_traces_endpoint silence_timeout_s start_first step_deadline_s tls_certificate tls_key
{{- end -}}

{{/* What groups get of their model's. */}}
{{- define "quire.groupsOfModel" -}}
autoscaling cpus_per_group engine group_resource nodes_per_group num_groups served_model_name
{{- end -}}

{{/* What further models have like the first one, unless they say otherwise. */}}
{{- define "quire.commonOfModels" -}}
cpus_per_group group_resource max_inflight max_queue_wait_s max_queued_bytes max_queued_requests nodes_per_group reasoning_parser routing tool_call_parser
{{- end -}}
