{{- define "mpsd.selector" -}}
app.kubernetes.io/name: mpsd
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "mpsd.labels" -}}
{{ include "mpsd.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "mpsd.image" -}}
{{ .Values.image.repository }}{{ with .Values.image.digest }}@{{ . }}{{ else }}:{{ .Values.image.tag }}{{ end }}
{{- end -}}

{{- /* "yes" where mpsd-kubernetes talks to the API server, and nothing elsewhere. */ -}}
{{- define "mpsd.hasAccount" -}}
{{- if or .Values.dra.enabled (and .Values.devicePlugin.enabled (or .Values.nodeLabels .Values.podEvents.enabled)) }}yes{{ end -}}
{{- end -}}
