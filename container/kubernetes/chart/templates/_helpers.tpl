{{- define "mpsd.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- /* The name of most objects, and the beginning of the others' names. */ -}}
{{- define "mpsd.fullname" -}}
{{- $release := ternary .Release.Name (printf "%s-%s" .Release.Name (include "mpsd.name" .)) (contains (include "mpsd.name" .) .Release.Name) -}}
{{- default $release .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "mpsd.selector" -}}
app.kubernetes.io/name: {{ include "mpsd.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- /* The metadata of an object: (list . NAME), with labels and annotations of its own as a third and a fourth part. */ -}}
{{- define "mpsd.metadata" -}}
{{- $root := first . -}}
{{- $own := concat (rest (rest .)) (list dict dict) -}}
name: {{ index . 1 }}
labels:
  {{- include "mpsd.selector" $root | nindent 2 }}
  app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
  app.kubernetes.io/managed-by: {{ $root.Release.Service }}
  helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version }}
  {{- with merge dict (first $own) $root.Values.commonLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge dict (index $own 1) $root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "mpsd.image" -}}
{{ .Values.image.repository }}{{ with .Values.image.digest }}@{{ . }}{{ else }}:{{ .Values.image.tag }}{{ end }}
{{- end -}}

{{- /* The values of the program that offers the shares: of the driver, or of the device plugin. */ -}}
{{- define "mpsd.part" -}}
{{- if and .Values.dra.enabled .Values.devicePlugin.enabled }}
{{- fail "dra.enabled and devicePlugin.enabled: a node offers its GPUs by one of both; set devicePlugin.enabled=false" }}
{{- end }}
{{- ternary .Values.dra .Values.devicePlugin .Values.dra.enabled | toYaml }}
{{- end -}}

{{- /* The arguments of mpsd-kubernetes. */ -}}
{{- define "mpsd.arguments" -}}
{{- $part := include "mpsd.part" . | fromYaml -}}
{{- concat (list "--config" "/etc/mpsd/kubernetes.toml" "--node" "$(NODE_NAME)" "--kubelet-dir" $part.kubeletDirectory) (ternary (list "--dra") list .Values.dra.enabled) | toJson }}
{{- end -}}

{{- /* Its environment, in which a variable MPSD_KUBERNETES_NAME overrides a setting. */ -}}
{{- define "mpsd.environment" -}}
- name: NODE_NAME
  valueFrom:
    fieldRef:
      fieldPath: spec.nodeName
{{- if ne .Values.domain "mpsd.internal" }}
- name: MPSD_KUBERNETES_DOMAIN
  value: {{ .Values.domain }}
{{- end }}
{{- if include "mpsd.usesApi" . }}
- name: MPSD_KUBERNETES_REPORT
  value: {{ ternary "always" "never" .Values.nodeLabels }}
- name: MPSD_KUBERNETES_POD_EVENTS
  value: {{ ternary "always" "never" .Values.podEvents.enabled }}
{{- end }}
{{- with (include "mpsd.part" . | fromYaml).extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "mpsd.nodeSelector" -}}
{{- default (dict (printf "%s/sharing" .Values.domain) "true") .Values.nodeSelector | toYaml }}
{{- end -}}

{{- /* "yes" where mpsd-kubernetes talks to the API server, and nothing elsewhere. */ -}}
{{- define "mpsd.usesApi" -}}
{{- if or .Values.dra.enabled (and .Values.devicePlugin.enabled (or .Values.nodeLabels .Values.podEvents.enabled)) }}yes{{ end -}}
{{- end -}}

{{- /* The account of the pods; nothing where they need none of their own. */ -}}
{{- define "mpsd.account" -}}
{{- if or (include "mpsd.usesApi" .) .Values.openshift .Values.serviceAccount.name }}
{{- if not (or .Values.serviceAccount.create .Values.serviceAccount.name) }}
{{- fail "serviceAccount.create=false: name the account of the pods in serviceAccount.name" }}
{{- end }}
{{- default (printf "%s-kubernetes" (include "mpsd.fullname" .)) .Values.serviceAccount.name }}
{{- end }}
{{- end -}}

{{- /* The files of both programs. */ -}}
{{- define "mpsd.configuration" -}}
{{- if and .Values.metrics.enabled (regexMatch "(?m)^[ \\t]*\\[?[ \\t]*[\"']?metrics[\"']?[ \\t]*[].=]" .Values.mpsd.config) }}
{{- fail "mpsd.config has a section [metrics], and metrics.enabled=true adds one: set the values of metrics, or metrics.enabled=false" }}
{{- end -}}
mpsd.toml: |
  {{- .Values.mpsd.config | trim | nindent 2 }}
  {{- with .Values.metrics }}
  {{- if .enabled }}
  [metrics]
  listen = {{ printf "%s:%d" .address (int .port) | quote }}
  users = {{ .users }}
  {{- end }}
  {{- end }}
{{- $part := include "mpsd.part" . | fromYaml }}
{{- if $part.enabled }}
kubernetes.toml: |
  {{- $part.config | trim | nindent 2 }}
{{- end }}
{{- end -}}
