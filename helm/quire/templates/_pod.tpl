{{/* The pods of Ray: what all have, over that what `pods`, `head`, `gateway`, `groups` and `moreModels` ask for. */}}

{{/* The options of one kind of pods over those of all, as JSON: lists are joined, maps have the keys of both, anything
else is its own if it has one. (root, the kind's values) */}}
{{- define "quire.podOptions" -}}
{{- $own := index . 1 -}}
{{- $options := dict -}}
{{- range $name, $common := (index . 0).Values.pods -}}
{{- $mine := get $own $name -}}
{{- if kindIs "slice" $common -}}
{{- $_ := set $options $name (concat $common ($mine | default list) | default list) -}}
{{- else if kindIs "map" $common -}}
{{- $_ := set $options $name (include "quire.over" (list $common ($mine | default dict)) | fromJson) -}}
{{- else -}}
{{- $_ := set $options $name (default $common $mine) -}}
{{- end -}}
{{- end -}}
{{- toJson $options -}}
{{- end -}}

{{/* A map with the keys of another in place of its own, as JSON. */}}
{{- define "quire.over" -}}
{{- $both := deepCopy (index . 0) -}}
{{- range $key, $value := index . 1 -}}{{- $_ := set $both $key $value -}}{{- end -}}
{{- toJson $both -}}
{{- end -}}

{{/* A list of things with names, in which a later one replaces an earlier one of its name: the API server refuses two. */}}
{{- define "quire.byName" -}}
{{- $last := dict -}}
{{- $names := list -}}
{{- range . -}}
{{- $_ := set $last .name . -}}
{{- $names = append $names .name -}}
{{- end -}}
{{- range uniq $names }}
- {{ toJson (get $last .) }}
{{- end -}}
{{- end -}}

{{/* A probe as it is by default, with what is asked for in its place; another handler replaces the default one. */}}
{{- define "quire.probe" -}}
{{- $default := index . 0 -}}
{{- $own := index . 1 -}}
{{- range list "exec" "grpc" "httpGet" "tcpSocket" -}}
{{- if hasKey $own . -}}{{- $default = omit $default "httpGet" -}}{{- end -}}
{{- end -}}
{{- include "quire.over" (list $default $own) -}}
{{- end -}}

{{/* What tells that a node of Ray is alive, as its agent says. KubeRay's own probes need wget, which the image lacks. */}}
{{- define "quire.rayHealth" -}}
httpGet: {path: /api/healthz, port: 52365}
timeoutSeconds: 5
periodSeconds: 5
{{- end -}}

{{- define "quire.serviceAccountName" -}}
{{- with .Values.serviceAccount -}}
{{- if .create -}}{{ default (include "quire.fullname" $) .name }}{{- else -}}{{ .name }}{{- end -}}
{{- end -}}
{{- end -}}

{{/* The metadata and spec of a pod of Ray, from a dict of

    root         the chart's root
    component    head, gateway or group
    group        the name of its worker group; the head has none
    own          values of its kind, which may have any option of `pods`
    resources    its container's
    grace        seconds until it is killed, when it stops; the head's is the default
    automount    whether it speaks to Kubernetes
    ports, mounts, volumes   lists, beside those that all have
    readiness    its probe, unless it is that of Ray's node
    preStop      a command that runs before it is stopped
    topologyKeys  what pods of the group are spread over
*/}}
{{- define "quire.pod" -}}
{{- $root := .root -}}
{{- $pod := include "quire.podOptions" (list $root .own) | fromJson -}}
{{- $health := include "quire.rayHealth" $root | fromYaml -}}
{{- $labels := include "quire.componentSelector" (list $root .component) | fromYaml -}}
metadata:
  labels:
    # Not the versions of chart and application: a change of those alone is no reason for another Ray cluster.
    {{- merge $labels $pod.podLabels | toYaml | nindent 4 }}
  {{- with $pod.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- with include "quire.serviceAccountName" $root }}
  serviceAccountName: {{ . }}
  {{- end }}
  # The autoscaler, beside the head, is all that speaks to Kubernetes.
  automountServiceAccountToken: {{ .automount | default false }}
  enableServiceLinks: false
  {{- with .grace }}
  terminationGracePeriodSeconds: {{ . }}
  {{- end }}
  securityContext:
    {{- include "quire.over" (list (include "quire.podSecurity" $root | fromYaml) $pod.podSecurityContext) | fromJson | toYaml | nindent 4 }}
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $pod.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $pod.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $pod.schedulerName }}
  schedulerName: {{ . }}
  {{- end }}
  {{- with $pod.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $pod.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $pod.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if or .topologyKeys $pod.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- range .topologyKeys }}
    - topologyKey: {{ . }}
      maxSkew: 1
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "quire.componentSelector" (list $root $.component) | nindent 10 }}
          # KubeRay's label, which tells the groups of different models apart.
          ray.io/group: {{ $.group }}
    {{- end }}
    {{- with $pod.topologySpreadConstraints }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
  {{- with $pod.initContainers }}
  initContainers:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    # Ray's is the first: KubeRay goes by that.
    - name: {{ ternary "ray-head" "ray-worker" (eq .component "head") }}
      image: {{ include "quire.image" $root }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      env:
        {{- include "quire.byName" (concat (include "quire.env" $root | fromYamlArray) $pod.env) | nindent 8 }}
      {{- with $pod.envFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      ports:
        {{- range .ports }}
        - {{ toJson . }}
        {{- end }}
        - {name: metrics, containerPort: 8090}
      {{- with $pod.startupProbe }}
      startupProbe:
        {{- include "quire.probe" (list $health .) | fromJson | toYaml | nindent 8 }}
      {{- end }}
      readinessProbe:
        {{- $ready := .readiness | default (merge (dict "initialDelaySeconds" 10 "failureThreshold" 10) $health) }}
        {{- include "quire.probe" (list $ready $pod.readinessProbe) | fromJson | toYaml | nindent 8 }}
      livenessProbe:
        {{- $alive := merge (dict "initialDelaySeconds" 30 "failureThreshold" 120) $health }}
        {{- include "quire.probe" (list $alive $pod.livenessProbe) | fromJson | toYaml | nindent 8 }}
      {{- with .preStop }}
      lifecycle:
        preStop:
          exec:
            command: {{ toJson . }}
      {{- end }}
      resources:
        {{- toYaml .resources | nindent 8 }}
      securityContext:
        {{- include "quire.over" (list (include "quire.containerSecurity" $root | fromYaml) $pod.securityContext) | fromJson | toYaml | nindent 8 }}
      volumeMounts:
        - {name: scratch, mountPath: /tmp}
        {{- range concat (.mounts | default list) (include "quire.modelMount" $root | fromYamlArray) $pod.extraVolumeMounts }}
        - {{ toJson . }}
        {{- end }}
    {{- with $pod.extraContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    - {name: scratch, emptyDir: {sizeLimit: {{ $root.Values.scratchSize }}}}
    {{- range concat (.volumes | default list) (include "quire.modelVolume" $root | fromYamlArray) $pod.extraVolumes }}
    - {{ toJson . }}
    {{- end }}
{{- end -}}

{{/* (root, grace) */}}
{{- define "quire.gatewayPod" -}}
{{- $gateway := .root.Values.gateway -}}
{{- $scheme := ternary "https" "http" $gateway.tls.enabled -}}
{{- $ports := list -}}
{{- range $name, $port := dict "grpc" $gateway.ports.grpc "http" $gateway.ports.http "own-metrics" $gateway.ports.metrics -}}
{{- $ports = append $ports (dict "name" $name "containerPort" $port) -}}
{{- end -}}
{{- $mounts := list -}}
{{- $volumes := list -}}
{{- if $gateway.tls.enabled -}}
{{- $secret := required "gateway.tls.secretName is needed for TLS" $gateway.tls.secretName -}}
{{- $mounts = append $mounts (dict "name" "tls" "mountPath" "/etc/quire/tls" "readOnly" true) -}}
{{- $volumes = append $volumes (dict "name" "tls" "secret" (dict "secretName" $secret)) -}}
{{- end -}}
{{- with $gateway.apiKeys -}}
{{- if .enabled -}}
{{- $secret := required "gateway.apiKeys.secretName is needed for API keys" .secretName -}}
{{- $items := list (dict "key" .key "path" "keys") -}}
{{- $mounts = append $mounts (dict "name" "api-keys" "mountPath" "/etc/quire/api-keys" "readOnly" true) -}}
{{- $volumes = append $volumes (dict "name" "api-keys" "secret" (dict "secretName" $secret "items" $items)) -}}
{{- end -}}
{{- end -}}
{{- /* Answers 200 once a group has decoded a token and is attached; where the last group may go, always: a request must
come to wake one. */ -}}
{{- $health := dict "path" "/health" "port" "http" "scheme" (upper $scheme) -}}
{{- $idle := list "python" "-m" "quire.cluster.deploy.wait_idle" (printf "%s://127.0.0.1:%v" $scheme $gateway.ports.metrics) "--timeout-s" (toString $gateway.drainSeconds) -}}
{{- include "quire.pod" (dict "root" .root "component" "gateway" "group" "gateway" "own" $gateway "grace" .grace
  "resources" $gateway.resources "ports" $ports "mounts" $mounts "volumes" $volumes "preStop" $idle
  "readiness" (dict "httpGet" $health "periodSeconds" 2 "failureThreshold" 2) "topologyKeys" $gateway.topologyKeys) -}}
{{- end -}}

{{/* (root, grace, group; own: the values of `groups`, or those of a model over them; ranks in the pod; device) */}}
{{- define "quire.groupPod" -}}
{{- $resources := deepCopy .own.resources -}}
{{- if eq .device "cuda" -}}
{{- $gpus := dict .own.gpuResource (toString .ranks) -}}
{{- $_ := set $resources "limits" (merge $gpus (get $resources "limits" | default dict)) -}}
{{- end -}}
{{- $mounts := list (dict "name" "shm" "mountPath" "/dev/shm") -}}
{{- $volumes := list (dict "name" "shm" "emptyDir" (dict "medium" "Memory" "sizeLimit" .own.sharedMemory)) -}}
{{- include "quire.pod" (dict "root" .root "component" "group" "group" .group "own" .own "grace" .grace
  "resources" $resources "mounts" $mounts "volumes" $volumes "topologyKeys" .own.topologyKeys) -}}
{{- end -}}

{{/* The worker group of one of `moreModels` that has pods of its own, and the resource that Ray places its groups by. */}}
{{- define "quire.ownGroup" -}}
{{- $name := regexReplaceAll "[^a-z0-9]+" (lower .served_model_name) "-" | trunc 20 | trimAll "-" -}}
{{- printf "%s-%s" $name (sha256sum .served_model_name | trunc 5) -}}
{{- end -}}

{{- define "quire.ownResource" -}}
quire_group_{{ include "quire.ownGroup" . | replace "-" "_" }}
{{- end -}}

{{/* The fewest and the most groups of one of `moreModels`, as JSON. */}}
{{- define "quire.groupCounts" -}}
{{- if .autoscaling -}}
{{- $min := int (ternary .autoscaling.min_groups 1 (hasKey .autoscaling "min_groups")) -}}
{{- toJson (dict "min" $min "max" (max $min (int .autoscaling.max_groups))) -}}
{{- else -}}
{{- $number := int (default 1 .num_groups) -}}
{{- toJson (dict "min" $number "max" $number) -}}
{{- end -}}
{{- end -}}

{{/* The same of all models in the pods of `groups`. */}}
{{- define "quire.sharedGroups" -}}
{{- $first := .Values.groups -}}
{{- $min := ternary $first.autoscaling.minGroups $first.replicas $first.autoscaling.enabled -}}
{{- $max := ternary $first.autoscaling.maxGroups $first.replicas $first.autoscaling.enabled -}}
{{- range .Values.moreModels -}}
{{- if not .pod -}}
{{- $ranks := int (default $first.tensorParallelSize .engine.tensor_parallel_size) -}}
{{- if ne $ranks (int $first.tensorParallelSize) -}}
{{- fail (printf "moreModels: %s has engine.tensor_parallel_size=%d and the pods of groups are for %d: give it a pod of its own" .served_model_name $ranks (int $first.tensorParallelSize)) -}}
{{- end -}}
{{- $counts := include "quire.groupCounts" . | fromJson -}}
{{- $min = add $min $counts.min -}}
{{- $max = add $max $counts.max -}}
{{- end -}}
{{- end -}}
{{- toJson (dict "min" $min "max" $max) -}}
{{- end -}}
