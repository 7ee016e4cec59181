{{/* Names, labels and the parts that several pods share. */}}

{{- define "quire.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "quire.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "quire.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "quire.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "quire.selector" -}}
app.kubernetes.io/name: {{ include "quire.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "quire.labels" -}}
{{ include "quire.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "quire.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ default $.Chart.AppVersion .tag }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What a NetworkPolicy, a Service and a budget find one kind of pod by: (root, component). */}}
{{- define "quire.componentSelector" -}}
{{ include "quire.selector" (index . 0) }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* Ranks in one pod. */}}
{{- define "quire.ranksPerPod" -}}
{{- if mod .Values.groups.tensorParallelSize .Values.groups.nodesPerGroup -}}
{{- fail (printf "groups.nodesPerGroup=%d must divide groups.tensorParallelSize=%d" (int .Values.groups.nodesPerGroup) (int .Values.groups.tensorParallelSize)) -}}
{{- end -}}
{{- div .Values.groups.tensorParallelSize .Values.groups.nodesPerGroup -}}
{{- end -}}

{{- define "quire.podSecurity" -}}
runAsNonRoot: true
{{- with .Values.runAsUser }}
runAsUser: {{ . }}
runAsGroup: {{ . }}
fsGroup: {{ . }}
{{- end }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "quire.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* Environment of every Ray container: all that is written goes to the scratch volume. */}}
{{- define "quire.env" -}}
- {name: HOME, value: /tmp}
- {name: XDG_CACHE_HOME, value: /tmp/cache}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
- {name: RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S, value: "0"}
# The head asks each node every second, and gives up on it after this number of answers that did not come
# within 3 s. Ray's own settings take a minute.
- {name: RAY_health_check_period_ms, value: "1000"}
- {name: RAY_health_check_timeout_ms, value: "3000"}
- {name: RAY_health_check_failure_threshold, value: {{ max 1 (div .Values.ray.lostNodeSeconds 4) | quote }}}
- {name: RAY_gcs_rpc_server_reconnect_timeout_s, value: {{ .Values.ray.headLossSeconds | quote }}}
{{- if eq .Values.model.source "hub" }}
- {name: HF_HOME, value: {{ ternary "/models" "/tmp/huggingface" (ne (include "quire.modelClaim" .) "") }}}
{{- with .Values.model.hub.tokenSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ . }}, key: {{ $.Values.model.hub.tokenKey }}}
{{- end }}
{{- end }}
{{- end -}}

{{- define "quire.modelPath" -}}
{{- if eq .Values.model.source "hub" -}}
{{- printf "%s@%s" (required "model.hub.repository is needed where model.source is hub" .Values.model.hub.repository) .Values.model.hub.revision -}}
{{- else if ne .Values.model.source "demo" -}}
{{- printf "/models/%s" .Values.model.path | trimSuffix "/" -}}
{{- end -}}
{{- end -}}

{{/* The claim that holds checkpoints, where there is one. */}}
{{- define "quire.modelClaim" -}}
{{- $pvc := .Values.model.pvc -}}
{{- $made := ternary (default (printf "%s-models" (include "quire.fullname" .)) $pvc.claimName) "" $pvc.create -}}
{{- if eq .Values.model.source "pvc" -}}
{{- required "model.pvc.claimName is needed where model.source is pvc" (default $pvc.claimName $made) -}}
{{- else if eq .Values.model.source "hub" -}}
{{- default $made .Values.model.hub.cacheClaimName -}}
{{- end -}}
{{- end -}}

{{- define "quire.modelVolume" -}}
{{- with include "quire.modelClaim" . }}
- name: model
  persistentVolumeClaim:
    claimName: {{ . }}
{{- end }}
{{- if eq .Values.model.source "hostPath" }}
- name: model
  hostPath:
    path: {{ required "model.hostPath.path is needed where model.source is hostPath" .Values.model.hostPath.path }}
    type: Directory
{{- end }}
{{- end -}}

{{- define "quire.modelMount" -}}
{{- if or (include "quire.modelClaim" .) (eq .Values.model.source "hostPath") }}
- {name: model, mountPath: /models, readOnly: {{ ne .Values.model.source "hub" }}}
{{- end }}
{{- end -}}

{{/* The arguments of quire.cluster.deploy.app:application. */}}
{{- define "quire.settings" -}}
{{- $gateway := .Values.gateway -}}
{{- $admission := .Values.admission -}}
{{- $failover := .Values.failover -}}
{{- $engine := merge (dict "tensor_parallel_size" .Values.groups.tensorParallelSize) .Values.engine -}}
{{- with include "quire.modelPath" . }}{{ $_ := set $engine "model" . }}{{ end -}}
{{- /* The settings do not tell how many groups there are, so that the application cannot decide. */ -}}
{{- if not (or (hasKey $engine "kv_transfer") (gt (int .Values.groups.nodesPerGroup) 1) (eq (toString $engine.enable_prefix_caching) "false")) -}}
{{- $_ := set $engine "kv_transfer" true -}}
{{- end -}}
{{- $settings := dict
  "engine" $engine
  "routing" .Values.routing
  "nodes_per_group" .Values.groups.nodesPerGroup
  "cpus_per_group" (mulf .Values.groups.cpusPerGroup .Values.groups.nodesPerGroup)
  "group_resource" "quire_group"
  "group_host" "auto"
  "gateway_resource" "quire_gateway"
  "host" "0.0.0.0"
  "grpc_port" $gateway.ports.grpc
  "http_port" $gateway.ports.http
  "metrics_port" $gateway.ports.metrics
  "ignore_unknown_fields" $gateway.ignoreUnknownFields
  "tool_call_parser" $gateway.toolCallParser
  "reasoning_parser" $gateway.reasoningParser
  "max_connections" (int $gateway.connections.max)
  "shut_out_s" $gateway.connections.shutOutSeconds
  "head_timeout_s" $gateway.connections.headTimeoutSeconds
  "body_timeout_s" $gateway.connections.bodyTimeoutSeconds
  "idle_timeout_s" $gateway.connections.idleTimeoutSeconds
  "max_queue_wait_s" $admission.maxQueueWaitSeconds
  "max_queued_requests" (int $admission.maxQueuedRequests)
  "max_queued_bytes" (int $admission.maxQueuedBytes)
  "max_inflight" (int $admission.maxInflight)
  "silence_timeout_s" $failover.silenceSeconds
  "step_deadline_s" $failover.stepDeadlineSeconds
  "max_group_deaths" $failover.maxGroupDeaths
  "group_wait_s" $failover.groupWaitSeconds
  "log_level" .Values.logs.level
  "log_format" .Values.logs.format
  "access_log" .Values.logs.access
  "drain_timeout_s" $gateway.drainSeconds
  "handover_s" $gateway.handoverSeconds
  "start_first" .Values.upgrade.startFirst -}}
{{- with .Values.groups.autoscaling }}{{ if .enabled -}}
{{- $_ := set $settings "autoscaling" (dict
  "min_groups" .minGroups
  "max_groups" .maxGroups
  "target_ttft_s" .targetTtftSeconds
  "max_kv_use" .maxKvUse
  "down_delay_s" .downDelaySeconds
  "idle_delay_s" .idleDelaySeconds
  "start_wait_s" .startWaitSeconds) -}}
{{- end }}{{ end -}}
{{- with $gateway.autoscaling }}{{ if .enabled -}}
{{- $_ := set $settings "gateway_autoscaling" (dict
  "min_gateways" .minGateways
  "max_gateways" .maxGateways
  "target_inflight" .targetInflight
  "down_delay_s" .downDelaySeconds) -}}
{{- end }}{{ end -}}
{{- with $gateway.connections.maxPerAddress }}{{ $_ := set $settings "max_connections_per_address" (int .) }}{{ end -}}
{{- $_ := set $settings "served_model_name" (include "quire.modelName" .) -}}
{{- if $gateway.tls.enabled -}}
{{- $_ := set $settings "tls_certificate" "/etc/quire/tls/tls.crt" -}}
{{- $_ := set $settings "tls_key" "/etc/quire/tls/tls.key" -}}
{{- end -}}
{{- with .Values.telemetry.otlpTracesEndpoint }}{{ $_ := set $settings "otlp_traces_endpoint" . }}{{ end -}}
{{- with $gateway.chatTemplate }}{{ $_ := set $settings "chat_template" . }}{{ end -}}
{{- with $gateway.allowOrigins }}{{ $_ := set $settings "allow_origins" . }}{{ end -}}
{{- if $gateway.apiKeys.enabled -}}
{{- $_ := set $settings "api_keys_file" "/etc/quire/api-keys/keys" -}}
{{- $_ := set $settings "open_metrics" $gateway.openMetrics -}}
{{- end -}}
{{- $settings = mergeOverwrite $settings (deepCopy .Values.settings) -}}
{{- $common := include "quire.pick" (list $settings (include "quire.commonOfModels" .)) | fromYaml -}}
{{- $models := list -}}
{{- range .Values.moreModels -}}
{{- $own := merge (dict "engine" (merge (deepCopy .engine) (omit $engine "model"))) (omit . "num_groups" "engine" "pod") $common -}}
{{- if .pod }}{{ $_ := set $own "group_resource" (include "quire.ownResource" .) }}{{ end -}}
{{- $models = append $models $own -}}
{{- end -}}
{{- with $models }}{{ $_ := set $settings "more_models" . }}{{ end -}}
{{- with .Values.loraModules }}{{ $_ := set $settings "lora_modules" . }}{{ end -}}
{{- toYaml $settings -}}
{{- end -}}

{{/* The settings with these names: (settings, names). */}}
{{- define "quire.pick" -}}
{{- $picked := dict -}}
{{- range $name := splitList " " (index . 1) -}}
{{- if hasKey (index $ 0) $name }}{{ $_ := set $picked $name (index $ 0 $name) }}{{ end -}}
{{- end -}}
{{- toYaml $picked -}}
{{- end -}}

{{/* The arguments of quire.cluster.deploy.app:groups for one of the models that "quire.settings" names, the first being number
0. Only what groups use: Serve replaces them when any of it changes. */}}
{{- define "quire.groupSettings" -}}
{{- $settings := include "quire.settings" .root | fromYaml -}}
{{- $model := $settings -}}
{{- if .number }}{{ $model = index $settings.more_models (sub .number 1 | int) }}{{ end -}}
{{- $ofModel := include "quire.pick" (list $model (include "quire.groupsOfModel" .)) | fromYaml -}}
{{- $ofCluster := include "quire.pick" (list $settings (include "quire.groupsOfCluster" .)) | fromYaml -}}
{{- toYaml (merge $ofModel $ofCluster) -}}
{{- end -}}

{{/* What clients call the first model, as quire.worker.model.hub.model_name makes it. */}}
{{- define "quire.modelName" -}}
{{- if .Values.model.servedName -}}
{{- .Values.model.servedName -}}
{{- else if eq .Values.model.source "demo" -}}
quire-demo
{{- else if eq .Values.model.source "hub" -}}
{{- .Values.model.hub.repository -}}
{{- else -}}
{{- include "quire.modelPath" . | base | trimSuffix ".gguf" -}}
{{- end -}}
{{- end -}}
